"""Environment of the TPU compiler, which is read when libtpu loads."""

import importlib.util
import os
import pathlib

import pytest

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


def pytest_collection_modifyitems(items):
    missing = importlib.util.find_spec("libtpu") is None
    for item in items:
        if pathlib.Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.tpu_compile)
            if missing:
                item.add_marker(pytest.mark.skip(reason="needs libtpu: pip install 'jax[tpu]'"))
