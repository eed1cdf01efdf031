"""The step kernels on the CPU, by Triton's interpreter, against the block-by-block loop; where Triton is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import copy, sys
import torch
sys.path.insert(0, {tests!r})
import test_kernels as t
from evenstep import shell, together
from evenstep.kernels import step


class Direct:
    # a table that needs no sending
    def __init__(self, rows, columns, dtype, device):
        self.dtype, self.last, self.there = dtype, None, None

    def send(self, now):
        self.there = torch.tensor(now, dtype=self.dtype)
        return self.there


step.Sent = Direct
torch.cuda.is_current_stream_capturing = lambda: False
torch.set_num_threads(1)
shell.begin = lambda layout, state, **k: step.TritonStep(layout, state, **k)
for name in {names!r}:
    for poison in ((), (1,)):
        torch.manual_seed(3)
        single = t.Net()
        many = copy.deepcopy(single)
        loop, kernels = t.OPTIMIZERS[name](single, foreach=False), t.OPTIMIZERS[name](many)
        shell_move = step.TritonStep.move
        step.TritonStep.move = lambda self, ok, floor: shell_move(self, torch.ones((), dtype=torch.bool), floor)
        shell_commit = step.TritonStep.commit
        step.TritonStep.commit = lambda self, ok: shell_commit(self, torch.ones((), dtype=torch.bool))
        import warnings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            t.train(loop, single, "cpu", steps=3, poison=poison)
            t.train(kernels, many, "cpu", steps=3, poison=poison)
        step.TritonStep.move, step.TritonStep.commit = shell_move, shell_commit
        assert kernels._plan.layouts and len(kernels._plan.rest) == 0, kernels._plan.rest
        for (label, a), b in zip(single.named_parameters(), many.parameters()):
            torch.testing.assert_close(b, a, rtol=5e-3, atol=3e-4, msg=lambda m: f"{{name}} {{label}}: {{m}}")
        expected, found = t.states(loop, single), t.states(kernels, many)
        for key, value in expected.items():
            message = lambda m: f"{{name}} {{key}}: {{m}}"
            torch.testing.assert_close(found[key], value, rtol=5e-3, atol=3e-4, msg=message)
        assert loop.fired() == kernels.fired(), (loop.fired(), kernels.fired())
    print(name, "agrees", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sg", "momentum", "unguarded", "fan-in", "even", "even-plain", "even-tight"])
def test_kernels_by_the_interpreter(name):
    pytest.importorskip("triton")
    code = CODE.format(tests=str(Path(__file__).parent), names=[name])
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
