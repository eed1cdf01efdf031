"""The architecture, held by a test: imports point one way, and the pure core knows neither modules nor hooks."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import evenstep
from evenstep import options

ROOT = Path(evenstep.__file__).parent
ORDER = [  # a package or file imports what stands before it alone, but for the types of annotations
    "math",
    "options",
    "foreach",
    "coordinates",
    "weight_decay",
    "kernels",
    "parallel.__init__",
    "parallel.dtensor",
    "parallel.shared_matrices",
    "model",
    "statistics",
    "rules",
    "step",
    "parallel.reduce_statistics",
    "torch_optimizer",
    "optimizers",
    "even_step",
    "whitened",
    "batchnorm",
    "monitor",
    "__init__",
    "__main__",
]
LIBRARY = sorted(p for p in ROOT.rglob("*.py") if "lab" not in p.relative_to(ROOT).parts)


def imports(path: Path) -> set[str]:
    """Every dotted name that a file needs to run, those of the package as evenstep.x."""
    package = ["evenstep", *path.relative_to(ROOT).parent.parts]
    found = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if not ast.unparse(node).startswith("if TYPE_CHECKING:")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found


def place(module: str) -> int | None:
    """The place in ORDER of a dotted name below the package, if it is a module there."""
    return next((k for k, name in enumerate(ORDER) if f"{module}.".startswith(f"{name}.")), None)


def own(path: Path) -> set[str]:
    """The modules of the package that a file imports, as dotted names below it."""
    return {name.removeprefix("evenstep.") for name in imports(path) if name.startswith("evenstep.")}


@pytest.mark.parametrize("path", LIBRARY, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path):
    here = place(".".join(path.relative_to(ROOT).with_suffix("").parts))
    assert here is not None, "has no place in ORDER"
    later = {name for name in own(path) if (place(name) or 0) > here}
    assert not later and (path.stem == "__main__" or not any(name.startswith("lab") for name in own(path)))


def test_no_two_modules_share_a_name():
    names = [path.stem for path in LIBRARY if path.stem != "__init__"]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("path", sorted((ROOT / "math").glob("*.py")), ids=lambda p: p.stem)
def test_math_is_pure(path):
    assert all(name.split(".")[0] == "math" for name in own(path)), own(path)
    assert not any(i.startswith("torch.") and i != "torch.Tensor" for i in imports(path)), imports(path)
    assert "nn." not in path.read_text(encoding="utf-8")


def test_hooks_are_registered_in_one_file():
    users = {p for p in LIBRARY if "register_forward" in p.read_text() or ".register_hook" in p.read_text()}
    assert users == {ROOT / "statistics" / "hooks.py"}


def test_a_step_enters_few_modules():
    """The torch text, warmed up; `math` and `options` apart."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
    optimizer, files = evenstep.UnitStep(model), set()

    def note(frame, event, arg):
        files.add(Path(frame.f_code.co_filename))

    for warm in (False, False, False, True):
        optimizer.zero_grad()
        model(torch.randn(6, 3, 4, 4)).square().mean().backward()
        sys.setprofile(note if warm else None)
        optimizer.step()
        sys.setprofile(None)
    paths = {file.relative_to(ROOT) for file in files if file.is_relative_to(ROOT)}
    entered = {str(path) for path in paths if path.parts[0] not in ("math", "options.py")}
    assert 5 < len(entered) <= 11, entered


def test_import_needs_torch_alone():
    code = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"matplotlib", "PIL", "jinja2", "optuna", "tensorboard"}:
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
import torch
before = set(sys.modules)
import evenstep
new = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
assert new <= {"evenstep", "torch"}, new
assert not any(name.startswith("evenstep.lab") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_keyword_is_explained_once_for_docstrings_and_docs():
    table = (Path(__file__).parent.parent / "docs" / "api.md").read_text().split("## Keywords")[1].split("\n\n")[1]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    meanings = {name: option.meaning for name, option in options.OPTIONS.items()}
    assert {name.strip("`*"): meaning for name, _, meaning, _ in rows} == meanings
    used = set()
    for cls in (getattr(evenstep, name) for name in evenstep.__all__):
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer):
            names = [*inspect.signature(cls).parameters]
            assert all(f"{name} (default " in cls.__doc__ or f"{name}: " in cls.__doc__ for name in names), cls
            used |= {*names}
    assert used == {*options.OPTIONS}
