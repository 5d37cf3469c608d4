"""The suite runs on the CPU, whose kernels give a row the same bits in any window."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

# Before mlx_lm is imported: it makes its generation stream on the default device.
mx.set_default_device(mx.cpu)

pytest.register_assert_rewrite("zoo")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--model-table",
        type=Path,
        metavar="FILE",
        help="write what tests/test_models.py found (see tests/model_table.py)",
    )


@pytest.fixture(scope="session")
def loaded() -> tuple[Any, Any]:
    """The shipped model and its tokenizer."""
    from mlx_rewind.load import load

    return load()


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--model-table")
    if path is not None and not hasattr(config, "workerinput"):
        from model_table import Table

        config.pluginmanager.register(Table(path))
