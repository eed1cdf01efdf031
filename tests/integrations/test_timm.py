"""timm's registry, where timm can be imported: its torchvision must fit the torch that is installed."""

import pytest

try:
    import timm  # noqa: F401
except Exception as error:
    pytest.skip(f"timm cannot be imported: {type(error).__name__}", allow_module_level=True)


@pytest.mark.feature("timm: create_optimizer_v2 by name")
def test_the_example_learns(example):
    result = example.main()
    assert result["last"] < result["first"]
    assert result["whitened"] > 40
