"""What the hooks write is plain, and reads back as the host's own objects."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("mmseg", reason="needs the extra mmseg-lite")

from mmengine.logging import HistoryBuffer, MessageHub

from mmseg_ext import PlainMessageHubHook, RandomStateHook
from mmseg_ext.hooks import plain


def test_message_hub_survives_a_weights_only_file(tmp_path):
    hub = MessageHub.get_instance("plain-test")
    for i in range(3):
        hub.update_scalar("train/loss", np.float32(0.5 * i))
        hub.update_scalar("train/lr", 0.25)
    hub.update_info("iter", np.int64(3))
    hub.update_info("table", {"scores": np.arange(3.0), "names": ("a", "b"), "nothing": None})
    hub.update_info("volatile", object(), resumed=False)
    checkpoint = {"message_hub": hub.state_dict()}
    PlainMessageHubHook().before_save_checkpoint(None, checkpoint)
    torch.save(checkpoint, tmp_path / "c.pth")

    loaded = torch.load(tmp_path / "c.pth", weights_only=True)
    PlainMessageHubHook().after_load_checkpoint(None, loaded)
    other = MessageHub.get_instance("plain-test-resumed")
    other.load_state_dict(loaded["message_hub"])
    history = other.get_scalar("train/loss")
    assert isinstance(history, HistoryBuffer)
    assert history.data[0].tolist() == [0.0, 0.5, 1.0] and history.data[1].tolist() == [1, 1, 1]
    history.update(4.0)
    assert history.mean() == 5.5 / 4 and other.get_scalar("train/lr").current() == 0.25
    assert other.get_info("iter") == 3 and type(other.get_info("iter")) is int
    assert other.get_info("table")["scores"].tolist() == [0.0, 1.0, 2.0]
    assert other.get_info("table")["names"] == ("a", "b") and other.get_info("volatile") is None


def test_checkpoints_of_others_pass_through():
    buffer = HistoryBuffer([1.0], [1])
    checkpoint = {"message_hub": dict(log_scalars={"loss": buffer}, runtime_info={}, resumed_keys={})}
    PlainMessageHubHook().after_load_checkpoint(None, checkpoint)
    assert checkpoint["message_hub"]["log_scalars"]["loss"] is buffer
    PlainMessageHubHook().after_load_checkpoint(None, {"state_dict": {}})


def test_plain():
    assert plain(np.float64(2)) == 2.0 and type(plain(np.float64(2))) is float
    assert plain([np.bool_(True), {1, 2}]) == [True, {1, 2}]
    assert torch.equal(plain(np.arange(3)), torch.arange(3)) and plain(np.array(["a"])) == ["a"]
    with pytest.raises(TypeError, match="SimpleNamespace"):
        plain({"a": [SimpleNamespace()]})


def test_random_state_goes_on_where_it_was():
    hook, checkpoint = RandomStateHook(), {}
    hook.before_save_checkpoint(None, checkpoint)
    expected = torch.rand(4)
    hook.after_load_checkpoint(None, checkpoint)
    hook.before_train_iter(SimpleNamespace(iter=7), 7)
    assert torch.equal(torch.rand(4), expected)
    following = torch.rand(4)
    hook.before_train_iter(SimpleNamespace(iter=8), 8)  # once only
    assert not torch.equal(torch.rand(4), following)


def test_a_new_run_from_old_weights_keeps_its_own_random_state():
    hook, checkpoint = RandomStateHook(), {}
    hook.before_save_checkpoint(None, checkpoint)
    drawn = torch.rand(4)
    hook.after_load_checkpoint(None, checkpoint)
    hook.before_train_iter(SimpleNamespace(iter=0), 0)
    assert not torch.equal(torch.rand(4), drawn)
    RandomStateHook().before_train_iter(SimpleNamespace(iter=5), 5)  # a checkpoint without it


def test_validation_leaves_the_random_state():
    hook = RandomStateHook()
    hook.before_val(None)
    expected = torch.rand(4)
    hook.after_val(None)
    assert torch.equal(torch.rand(4), expected)
