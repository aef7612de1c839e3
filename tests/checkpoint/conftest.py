import pytest

from flax_paged.checkpoint.hub import fetch_smollm2


@pytest.fixture(scope="session")
def smollm2_file():
    """SmolLM2's GGUF file: from the cache folder, or fetched once."""
    pytest.importorskip("gguf")
    try:
        return fetch_smollm2()
    except FileNotFoundError as error:
        pytest.skip(str(error))
