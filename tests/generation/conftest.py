import jax
import pytest
from toy import ToyModel


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    """Many tests make an engine over the same model: each program is compiled once a session."""
    names = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("jax_cache")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }
    old = {name: getattr(jax.config, name) for name in names}
    for name, value in names.items():
        jax.config.update(name, value)
    yield
    for name, value in old.items():
        jax.config.update(name, value)


@pytest.fixture(scope="session")
def model():
    return ToyModel()
