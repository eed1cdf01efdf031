"""The example that needs nothing but torch; those of trainers are in tests/integrations."""

from pathlib import Path

from helpers import module_at

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_the_plain_loop_learns():
    result = module_at(EXAMPLES / "plain_loop.py").main()
    assert result["accuracy"] > 0.95
    assert result["loss"] < 0.3


def test_every_example_is_run_by_a_test():
    tested = {
        f"{p.stem.removeprefix('test_')}_example" for p in (Path(__file__).parent / "integrations").glob("test_*")
    }
    assert {p.stem for p in EXAMPLES.glob("*.py")} <= tested | {"plain_loop"}
