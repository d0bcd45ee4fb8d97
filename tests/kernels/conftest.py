"""The kernels' tests: interpreted on the CPU, and the same tests compiled where there is a CUDA device."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    """Tests of shapes that only a GPU can do say what they miss."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device: Flash shapes take hours in Triton's interpreter")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
