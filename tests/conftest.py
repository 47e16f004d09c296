"""Fixtures that many folders share."""

import pytest

from branchline.base.config import Environment
from branchline.base.errors import ModelError
from branchline.models.source import open_checkpoint


@pytest.fixture(scope="session")
def default_checkpoint():
    """The model that is served when none is named; fetched once into the user cache if it is not installed."""
    try:
        return open_checkpoint(None, Environment.read().cache_dir, print)
    except ModelError as error:
        return pytest.fail(f"these tests need the default model: {error}", pytrace=False)
