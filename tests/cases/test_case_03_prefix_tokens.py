"""transformers 37817, 37836: pooled means and feature maps hold patches only."""

import torch

from jumbo_core.models import JumboViT


def model_with_registers(pool: str) -> JumboViT:
    return JumboViT(
        32, 16, num_classes=0, embed_dim=24, depth=2, num_heads=2, multiplier=3, registers=4, global_pool=pool
    ).eval()


def poison_prefix(model: JumboViT):
    """After the last block, every prefix token reads 1e3."""

    def hook(module, inputs, output):
        output = output.clone()
        output[:, : model.num_prefix_tokens] = 1e3
        return output

    return model.blocks[-1].register_forward_hook(hook)


def test_patch_mean_and_map_ignore_prefix_tokens():
    model = model_with_registers("avg")
    assert model.num_prefix_tokens == 7
    image = torch.randn(2, 3, 32, 32)
    mean, (feature_map,) = model(image), model.forward_intermediates(image, indices=1, intermediates_only=True)
    handle = poison_prefix(model)
    assert torch.equal(model(image), mean)
    assert torch.equal(model.forward_intermediates(image, indices=1, intermediates_only=True)[0], feature_map)
    handle.remove()
    assert feature_map.shape == (2, 24, 2, 2)


def test_jumbo_pool_is_slices_then_patch_mean():
    model = model_with_registers("jumbo")
    image = torch.randn(2, 3, 32, 32)
    tokens = model.forward_features(image)
    pooled = model(image)
    assert torch.equal(pooled[:, : 3 * 24], tokens[:, :3].flatten(1))
    assert torch.equal(pooled[:, 3 * 24 :], tokens[:, 7:].mean(1))
