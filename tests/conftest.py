"""Fixtures that many folders share."""

import pytest

from branchline.base.config import Environment
from branchline.base.errors import ModelError
from branchline.models.source import open_checkpoint


def pytest_collection_modifyitems(items):
    """Tests that compute with a whole model are marked: `-m "not real_model"` leaves them out."""
    for item in items:
        if "default_checkpoint" in getattr(item, "fixturenames", ()):
            item.add_marker("real_model")


@pytest.fixture(scope="session")
def default_checkpoint():
    """The model that is served when none is named; fetched once into the user cache if it is not installed."""
    try:
        return open_checkpoint(None, Environment.read().cache_dir, print)
    except ModelError as error:
        return pytest.fail(f"these tests need the default model: {error}", pytrace=False)
