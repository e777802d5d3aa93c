"""Fixtures of several files here: two small images (a file that needs others has its own), mmengine's log."""

import logging

import pytest
import torch


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(2, 3, 32, 32)


@pytest.fixture
def log():
    """Messages of mmengine's logger, which does not hand them to pytest's own handler."""
    MMLogger = pytest.importorskip("mmengine.logging").MMLogger
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = MMLogger.get_current_instance()
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)
