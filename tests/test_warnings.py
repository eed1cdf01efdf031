"""Which warnings are errors in tests: those attributed to evenstep or to a test, not those that other packages own."""

import warnings

import pytest

OTHERS = ["torch", "torch.jit._script", "triton.runtime.jit", "lightning.pytorch", "transformers", "numpy", "sys"]
ITS_OWN = ["evenstep", "evenstep.model.survey", "__main__", "conftest", "helpers", "oracle", "test_lab_cli"]
every_category = pytest.mark.parametrize("category", [DeprecationWarning, FutureWarning, UserWarning])


@pytest.mark.parametrize("module", OTHERS)
@every_category
def test_other_packages_warnings_pass(module, category):
    with warnings.catch_warnings(record=True) as passed:
        warnings.warn_explicit("deprecated", category, "file.py", 1, module=module)
    assert len(passed) == 1


@pytest.mark.parametrize("module", ITS_OWN)
@every_category
def test_warnings_of_the_library_and_its_tests_are_errors(module, category):
    with pytest.raises(category, match="avoidable"):
        warnings.warn_explicit("avoidable", category, "file.py", 1, module=module)


def test_exceptions_that_nobody_can_catch_are_errors():
    with pytest.raises(pytest.PytestUnraisableExceptionWarning):
        warnings.warn_explicit("in __del__", pytest.PytestUnraisableExceptionWarning, "file.py", 1, module="_pytest")
