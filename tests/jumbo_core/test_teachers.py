"""Teachers: which features they give, compared with hooks on the blocks; frozen; refusals."""

from functools import partial

import pytest
import timm
import torch
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from jumbo_core.distill import Teacher, as_teacher
from jumbo_core.distill.stages import find_vit, stage_ends
from jumbo_core.models import AdventurerViT, JumboViT

SMALL = dict(img_size=32, patch_size=8, embed_dim=24, depth=3, num_heads=2, num_classes=5)
TIMM = {
    "vit": (partial(VisionTransformer, **SMALL), 1),
    "avg": (partial(VisionTransformer, **SMALL, class_token=False, global_pool="avg"), 0),
    "registers": (partial(VisionTransformer, **SMALL, reg_tokens=4, no_embed_class=True, dynamic_img_size=True), 5),
    "distilled": (partial(VisionTransformerDistilled, **SMALL), 2),
    "clip": (partial(VisionTransformer, **SMALL, pre_norm=True, norm_layer=nn.LayerNorm), 1),
    "rope": (partial(Eva, **SMALL, use_rot_pos_emb=True, num_reg_tokens=4), 5),
}
HF = dict(
    hidden_size=24, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=8
)  # fmt: skip
TEXT = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=9)
# Class, configuration, number of prefix tokens.
TRANSFORMERS = {
    "vit": ("ViTModel", ("ViTConfig", HF), 1),
    "vit head": ("ViTForImageClassification", ("ViTConfig", HF), 1),
    "deit": ("DeiTForImageClassificationWithTeacher", ("DeiTConfig", HF), 2),
    "clip vision": ("CLIPVisionModel", ("CLIPVisionConfig", HF), 1),
    "clip": ("CLIPModel", ("CLIPConfig", dict(text_config=TEXT, vision_config=HF)), 1),
    "siglip": ("SiglipModel", ("SiglipConfig", dict(text_config=TEXT, vision_config=HF)), 0),
    "dinov2": ("Dinov2Model", ("Dinov2Config", HF), 1),
    "dinov2 backbone": ("Dinov2Backbone", ("Dinov2Config", HF), 1),
    "dinov2 registers": (
        "Dinov2WithRegistersForImageClassification",
        ("Dinov2WithRegistersConfig", dict(HF, num_register_tokens=4)),
        5,
    ),
    "dinov3": ("DINOv3ViTModel", ("DINOv3ViTConfig", dict(HF, num_register_tokens=3)), 4),
    "beit": ("BeitForImageClassification", ("BeitConfig", dict(HF, use_relative_position_bias=True)), 1),
    "mae": ("ViTMAEModel", ("ViTMAEConfig", dict(HF, mask_ratio=0.0)), 1),
}


def hf_model(name):
    transformers = pytest.importorskip("transformers")
    model, (config, arguments), prefix = TRANSFORMERS[name]
    return getattr(transformers, model)(getattr(transformers, config)(**arguments)), prefix


def hooked_outputs(model, blocks, run):
    """What the blocks return while ``run`` runs: an independent look at the same forward pass."""
    outputs = []
    hooks = [
        block.register_forward_hook(lambda module, args, out: outputs.append(out[0] if isinstance(out, tuple) else out))
        for block in blocks
    ]
    model.eval()
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return outputs


def blocks_of(model, depth):
    return next(m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m) == depth)


@pytest.mark.parametrize("name", TIMM)
def test_timm(name):
    make, prefix = TIMM[name]
    model, images = make(), torch.randn(2, 3, 32, 32)
    expected = hooked_outputs(model, model.blocks, lambda: model(images))

    teacher = as_teacher(model)
    features = teacher(images, 3)

    assert (teacher.depth, teacher.embed_dim, teacher.grid_of((32, 32))) == (3, 24, (4, 4))
    assert len(features) == 3 and expected[0].shape == (2, prefix + 16, 24)
    for got, block in zip(features, expected, strict=True):
        assert torch.equal(got, block[:, prefix:])


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name):
    model, prefix = hf_model(name)
    teacher, images = as_teacher(model), torch.randn(2, 3, 32, 32)
    # Noise in rising order is what keeps a masked autoencoder's patches in place; at ratio 0 it hides none.
    options = {"noise": torch.arange(16.0).expand(2, -1)} if name == "mae" else {}
    expected = hooked_outputs(model, blocks_of(teacher.model, 3), lambda: teacher.model(images, **options))

    features = teacher(images, 3)

    assert (teacher.depth, teacher.embed_dim, teacher.grid_of((32, 32))) == (3, 24, (4, 4))
    assert expected[0].shape == (2, prefix + 16, 24)
    for got, block in zip(features, expected, strict=True):
        assert torch.equal(got, block[:, prefix:])


@pytest.mark.parametrize("name", ["vit", "clip", "siglip", "dinov2 registers", "dinov3", "beit", "mae"])
def test_transformers_at_another_size(name):
    model, _ = hf_model(name)
    teacher = as_teacher(model)
    assert teacher.grid_of((48, 32)) == (6, 4)
    features = teacher(torch.randn(1, 3, 48, 32), 2)
    assert [tuple(f.shape) for f in features] == [(1, 24, 24), (1, 24, 24)]


def test_masked_autoencoders_see_everything_in_order():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTMAEConfig(
        **HF, decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=2, mask_ratio=0.75
    )
    model = transformers.ViTMAEForPreTraining(config)
    images = torch.randn(2, 3, 32, 32)
    teacher = as_teacher(model)
    state = torch.random.get_rng_state()
    first, again = teacher(images, [0, 2]), teacher(images, [0, 2])

    # By hand: embeddings and positions of every patch in order, then the blocks.
    vit = model.vit
    with torch.no_grad():
        x = vit.embeddings.patch_embeddings(images) + vit.embeddings.position_embeddings[:, 1:]
        token = vit.embeddings.cls_token + vit.embeddings.position_embeddings[:, :1]
        x = torch.cat([token.expand(2, -1, -1), x], dim=1)
        for block in blocks_of(vit, 3):
            x = block(x)
    assert (first[1] - x[:, 1:]).abs().max() < 1e-6
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(state, torch.random.get_rng_state())
    assert model.config.mask_ratio == 0.75  # as it was, for whoever trains the model


@pytest.mark.parametrize("kind", ["jumbo", "registers", "adventurer", "jumbo_adventurer"])
def test_own_models(kind):
    size = dict(img_size=32, patch_size=8, num_classes=3, embed_dim=16, depth=3)
    model = {
        "jumbo": partial(JumboViT, num_heads=2, multiplier=3),
        "registers": partial(JumboViT, num_heads=2, multiplier=0, registers=4),
        "adventurer": partial(AdventurerViT, d_state=8, head_dim=8),
        "jumbo_adventurer": partial(AdventurerViT, d_state=8, head_dim=8, multiplier=2),
    }[kind](**size).eval()
    images = torch.randn(2, 3, 32, 48)
    with torch.no_grad():
        expected = model.forward_intermediates(images, indices=[0, 2], output_fmt="NLC", intermediates_only=True)

    teacher = as_teacher(model)
    assert (teacher.depth, teacher.embed_dim, teacher.grid_of((32, 48))) == (3, 16, (4, 6))
    for got, block in zip(teacher(images, [0, 2]), expected, strict=True):
        assert got.shape == (2, 24, 16) and torch.equal(got, block)


def test_our_transformers_models():
    pytest.importorskip("transformers")
    from hf_ext import JumboConfig, JumboForImageClassification

    model = JumboForImageClassification(
        JumboConfig(image_size=32, patch_size=8, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    )
    teacher = as_teacher(model)
    assert teacher.model is find_vit(model) and teacher.depth == 2
    features = teacher(torch.randn(1, 3, 32, 32), 2)
    assert [tuple(f.shape) for f in features] == [(1, 16, 16)] * 2


def test_timm_models_wrapped_by_transformers():
    transformers = pytest.importorskip("transformers")
    model = transformers.TimmWrapperModel(
        transformers.TimmWrapperConfig(architecture="test_vit", model_args=dict(img_size=32, patch_size=8))
    )
    teacher = as_teacher(model)
    assert teacher.model is model.timm_model and teacher(torch.randn(1, 3, 32, 32), 1)[0].shape == (1, 16, 64)


def test_a_teacher_of_ones_own():
    class Plain(nn.Module):
        depth, embed_dim = 2, 3

        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def grid_of(self, image_size):
            return image_size[0] // 4, image_size[1] // 4

        def forward(self, images, stages):
            means = nn.functional.avg_pool2d(images, 4).flatten(2).transpose(1, 2)
            return [means * self.scale * (i + 1) for i in stages]

    model = Plain()
    assert isinstance(model, Teacher) and not isinstance(nn.Linear(2, 2), Teacher)
    teacher = as_teacher(model)
    first, second = teacher(torch.ones(1, 3, 8, 12), 2)
    assert torch.equal(first, torch.ones(1, 6, 3)) and torch.equal(second, 2 * first)
    assert not second.requires_grad and as_teacher(teacher) is teacher


def test_frozen_for_good():
    model = VisionTransformer(**SMALL, drop_path_rate=0.5, proj_drop_rate=0.5).train()
    teacher, images = as_teacher(model), torch.randn(2, 3, 32, 32, requires_grad=True)
    assert not any(p.requires_grad for p in model.parameters())
    expected = teacher(images, 1)[0]
    assert not expected.requires_grad
    teacher.train()
    assert not teacher.training and not model.blocks[0].training
    model.train()  # someone else's doing
    assert torch.equal(teacher(images, 1)[0], expected)
    assert not model.training and not model.blocks[0].training


def test_blocks_by_index_and_dtype_of_images():
    teacher = as_teacher(VisionTransformer(**SMALL))
    images = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    all_blocks = teacher(images, 3)
    last, first, again = teacher(images, [-1, 0, 2])
    assert torch.equal(first, all_blocks[0]) and torch.equal(last, all_blocks[2]) and torch.equal(again, last)
    assert last.dtype == torch.float32  # the teacher's own
    with pytest.raises(IndexError, match="block index 3 is outside of a model with 3 blocks"):
        teacher(images, [3])
    with pytest.raises(ValueError, match="at least one block"):
        teacher(images, [])
    with pytest.raises(ValueError, match="stages=4 is more than the 3 blocks there are; use at most 3"):
        teacher(images, 4)


@pytest.mark.parametrize(
    ("depth", "stages", "ends"),
    [(12, 4, [2, 5, 8, 11]), (6, 4, [0, 2, 3, 5]), (4, 4, [0, 1, 2, 3]), (24, 3, [7, 15, 23]), (5, 1, [4])],
)
def test_stage_ends(depth, stages, ends):
    assert stage_ends(depth, stages) == ends


def test_another_image_size_is_up_to_a_timm_model():
    images = torch.randn(1, 3, 48, 32)
    with pytest.raises(AssertionError, match=r"Input height \(48\) doesn't match model \(32\)"):
        as_teacher(VisionTransformer(**SMALL))(images, 1)
    teacher = as_teacher(VisionTransformer(**SMALL, dynamic_img_size=True))
    assert teacher.grid_of((48, 32)) == (6, 4) and teacher(images, 1)[0].shape == (1, 24, 24)


def test_models_without_patch_tokens():
    pooled = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 4))
    swin = SwinTransformer(32, patch_size=2, window_size=4, embed_dim=8, depths=(1, 1), num_heads=(2, 2))
    for model in (timm.create_model("test_resnet"), timm.create_model("test_convnext"), swin, pooled):
        with pytest.raises(TypeError, match=f"{type(model).__name__} has no patch tokens that can be read; support"):
            as_teacher(model)
    with pytest.raises(TypeError, match="a teacher is a torch module, got function"):
        as_teacher(lambda x: x)
    two = nn.ModuleList([JumboViT(32, 8, embed_dim=16, depth=1, num_heads=2) for _ in range(2)])
    with pytest.raises(TypeError, match="ModuleList holds 2 image models"):
        as_teacher(two)


def test_transformers_models_without_patch_tokens():
    transformers = pytest.importorskip("transformers")
    swin = transformers.SwinModel(
        transformers.SwinConfig(image_size=32, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 2])
    )
    resnet = transformers.ResNetModel(transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1]))
    text = transformers.BertModel(transformers.BertConfig(**TEXT))
    for model in (swin, resnet, text):
        with pytest.raises(TypeError, match=f"{type(model).__name__} has no patch tokens"):
            as_teacher(model)

    # Detection tokens stand behind the patches: which are which cannot be told from the count.
    yolos = transformers.YolosModel(transformers.YolosConfig(**dict(HF, image_size=[32, 32]), num_detection_tokens=10))
    with pytest.raises(ValueError, match=r"YolosModel has no patch tokens that can be told .* \(1, 27, 24\) for 16"):
        as_teacher(yolos)(torch.randn(1, 3, 32, 32), 1)


def test_outputs_of_another_shape_are_named():
    teacher = as_teacher(VisionTransformer(**SMALL))
    teacher.embed_dim = 23
    with pytest.raises(ValueError, match=r"block 2 gives \(1, 16, 24\) where .* = \(1, 4\*4, 23\) was expected"):
        teacher(torch.randn(1, 3, 32, 32), 1)


def test_an_image_that_the_patch_size_does_not_divide_is_refused():
    """The model would drop the last rows, and a resampled grid would be stretched over pixels it never saw."""
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=36, patch_size=12
    )
    teacher = as_teacher(transformers.ViTModel(config))
    assert teacher.grid_of((36, 48)) == (3, 4)
    with pytest.raises(ValueError, match="image height 40 is not a multiple of the patch size 12"):
        teacher(torch.randn(1, 3, 40, 36), 2)
