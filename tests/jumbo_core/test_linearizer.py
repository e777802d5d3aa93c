"""ViTLinearizer: what is compared with what, what trains, what is saved, how it runs."""

import copy

import pytest
import torch
from torch.nn import functional as F

from jumbo_core.distill import (
    ViTLinearizer,
    activation_matching_reference,
    map_distance,
    plot_activation_maps,
    random_mask,
)
from tests.jumbo_core.linearizer_models import adventurer, jumbo, mask_of, teacher_vit

STUDENTS = {"adventurer": adventurer, "jumbo_adventurer": lambda: adventurer(multiplier=2), "jumbo": jumbo}


@pytest.mark.parametrize("kind", STUDENTS)
def test_loss_is_what_the_method_says(kind):
    teacher, student = teacher_vit().eval(), STUDENTS[kind]().eval()
    images, mask = torch.randn(2, 3, 32, 32), mask_of()
    linearizer = ViTLinearizer(teacher, student, stages=2, mask_weight=0.5, activation_weight=3.0, beta=0.7)
    linearizer.eval()
    losses = linearizer(images, mask)

    # The teacher: whole images, blocks 2 and 5 of 6. The student: blocks 1 and 3 of 4, masked embeddings replaced.
    with torch.no_grad():
        seen = teacher.forward_intermediates(images, indices=[2, 5], output_fmt="NLC", intermediates_only=True)
        patches, _ = student.embed(images, replace=(mask, linearizer.mask_token))
        _, blocks = student.encoder(patches, collect={1, 3})
        learned = [student.encoder.split(blocks[i]).patches for i in (1, 3)]
        maps = []
        for t, s in zip(seen, learned, strict=True):
            assert t.shape == (2, 16, 24) and s.shape == (2, 16, 16)
            for b in range(2):
                t_visible, s_visible = t[b][~mask[b]][None], s[b][~mask[b]][None]
                assert t_visible.shape[1] == 4
                maps.append(activation_matching_reference(t_visible.double(), s_visible.double()))
        activation = sum(maps) / 4
        target = F.layer_norm(seen[1], (24,))[mask]
        masked = F.smooth_l1_loss(linearizer.predictor(learned[1])[mask], target, beta=0.7)

    assert losses.keys() == {"loss", "activation", "masked"}
    assert abs(losses["activation"] - activation) < 1e-5 and activation > 0.01
    assert abs(losses["masked"] - masked) < 1e-5 and masked > 0.1
    assert abs(losses["loss"] - (3.0 * activation + 0.5 * masked)) < 1e-5


def test_defaults_and_the_random_mask():
    linearizer = ViTLinearizer(teacher_vit(), adventurer())
    assert (linearizer.stages, linearizer.mask_ratio) == (4, 0.75)
    assert (linearizer.mask_weight, linearizer.activation_weight, linearizer.beta) == (1.0, 1.0, 1.0)
    assert linearizer.normalize_target and not linearizer.resample_teacher
    assert linearizer.mask_token.shape == (16,) and linearizer.predictor.weight.shape == (24, 16)
    images = torch.randn(2, 3, 32, 32)
    linearizer.eval()
    first, other = linearizer(images), linearizer(images)
    assert first["loss"] != other["loss"]  # another mask every time
    assert abs(first["loss"] - (first["activation"] + first["masked"])) < 1e-6
    torch.manual_seed(5)
    first = linearizer(images)
    torch.manual_seed(5)
    assert torch.equal(first["loss"], linearizer(images)["loss"])


@pytest.mark.parametrize("kind", STUDENTS)
def test_the_student_does_not_see_masked_patches(kind):
    linearizer = ViTLinearizer(teacher_vit(), STUDENTS[kind]()).eval()
    images, mask = torch.randn(1, 3, 32, 32), torch.zeros(1, 16, dtype=torch.bool)
    mask[0, 5] = True  # row 1, column 1 of the 4x4 grid
    changed = images.clone()
    changed[:, :, 8:16, 8:16] += 1
    before, after = linearizer.features(images, mask), linearizer.features(changed, mask)
    assert all(torch.equal(a, b) for a, b in zip(before.student, after.student, strict=True))
    assert not torch.equal(before.teacher[0], after.teacher[0])  # the teacher sees the whole image
    whole = linearizer.features(images)
    assert not torch.equal(whole.student[0], before.student[0])
    assert not torch.equal(whole.student[0], linearizer.features(changed).student[0])


def test_a_loss_of_weight_zero_is_not_computed():
    images, mask = torch.randn(2, 3, 32, 32), mask_of()
    both = ViTLinearizer(teacher_vit(), adventurer()).eval()
    expected = both(images, mask)

    maps = copy.deepcopy(both)
    maps.mask_weight = 0.0
    losses = maps(images, mask)
    assert losses["masked"] == 0 and torch.equal(losses["loss"], losses["activation"])
    assert torch.equal(losses["activation"], expected["activation"])
    losses["loss"].backward()
    assert maps.predictor.weight.grad is None

    masks = copy.deepcopy(both)
    masks.activation_weight = 0.0
    read, asked = masks.teacher.block_outputs, []
    masks.teacher.block_outputs = lambda x, indices: asked.append(indices) or read(x, indices)
    losses = masks(images, mask)
    assert losses["activation"] == 0 and torch.equal(losses["loss"], losses["masked"])
    assert torch.equal(losses["masked"], expected["masked"])
    assert asked == [[5]]  # the teacher's last block alone

    with pytest.raises(ValueError, match="both 0: there is nothing to learn"):
        ViTLinearizer(teacher_vit(), adventurer(), mask_weight=0, activation_weight=0)


@pytest.mark.parametrize("kind", STUDENTS)
def test_what_trains(kind):
    linearizer = ViTLinearizer(teacher_vit(), STUDENTS[kind]())
    linearizer(torch.randn(2, 3, 32, 32))["loss"].backward()
    idle = {name for name, p in linearizer.named_parameters() if p.grad is None or not p.grad.abs().max()}
    # What patches cannot see: head, final norm, and what changes the global token alone in the last block.
    allowed = ("student.head.", "student.encoder.norm.", "student.encoder.blocks.3.norm3.")
    assert idle and all(name.startswith(allowed) for name in idle), idle
    assert linearizer.mask_token.grad.abs().max() > 0
    assert all(p.grad is None for p in linearizer.teacher.parameters())


def test_the_teacher_is_apart():
    teacher = teacher_vit(drop_path_rate=0.5, proj_drop_rate=0.5)
    linearizer = ViTLinearizer(teacher, adventurer()).train()
    roots = {name.split(".")[0] for name in linearizer.state_dict()}
    assert roots == {"student", "mask_token", "predictor"}
    assert {name.split(".")[0] for name, _ in linearizer.named_parameters()} == roots
    assert not teacher.training and linearizer.student.training
    assert not any(p.requires_grad for p in teacher.parameters())

    linearizer.requires_grad_(True)
    assert not any(p.requires_grad for p in teacher.parameters())
    images, mask = torch.randn(2, 3, 32, 32), mask_of()
    linearizer.student.eval()
    assert torch.equal(linearizer(images, mask)["loss"], linearizer(images, mask)["loss"])  # no dropout in the teacher

    clone = copy.deepcopy(linearizer)
    assert clone.teacher is not linearizer.teacher
    assert torch.equal(clone(images, mask)["loss"], linearizer(images, mask)["loss"])

    linearizer.double()  # the teacher goes where the student goes
    assert next(teacher.parameters()).dtype == torch.float64
    assert linearizer(images.double(), mask)["loss"].dtype == torch.float64
    assert "teacher=VisionTransformer, stages=4, mask_ratio=0.75" in repr(linearizer)


def test_saved_and_loaded():
    first, second = ViTLinearizer(teacher_vit(), adventurer()).eval(), ViTLinearizer(teacher_vit(), adventurer()).eval()
    second.teacher.load_state_dict(first.teacher.state_dict())
    images, mask = torch.randn(2, 3, 32, 32), mask_of()
    assert not torch.equal(first(images, mask)["loss"], second(images, mask)["loss"])
    second.load_state_dict(first.state_dict(), strict=True)
    assert torch.equal(first(images, mask)["loss"], second(images, mask)["loss"])
    adventurer().load_state_dict({k[8:]: v for k, v in first.state_dict().items() if k.startswith("student.")})


def test_training_brings_the_maps_nearer():
    images = F.interpolate(torch.randn(8, 3, 3, 3), 32, mode="bilinear")  # smooth: patches tell of their neighbours
    linearizer = ViTLinearizer(teacher_vit(), adventurer(), stages=2)
    before = map_distance(linearizer, images)
    optimizer = torch.optim.AdamW(linearizer.parameters(), lr=3e-3)
    history = []
    for _ in range(40):
        losses = linearizer(images)
        optimizer.zero_grad()
        losses["loss"].backward()
        optimizer.step()
        history.append(losses["masked"].item())
    after = map_distance(linearizer, images)
    assert len(after) == 2 and all(a < 0.5 * b for a, b in zip(after, before, strict=True)), (before, after)
    assert sum(history[-5:]) < 0.9 * sum(history[:5]), history


def test_map_distance():
    teacher = jumbo()
    student = copy.deepcopy(teacher)
    student.train()
    student.blocks[1].eval()
    images, state = torch.randn(2, 3, 32, 48), torch.random.get_rng_state()
    distances = map_distance((teacher, student), images)
    assert len(distances) == 4 and max(abs(d) for d in distances) < 1e-6
    assert student.training and student.blocks[2].training and not student.blocks[1].training
    assert torch.equal(state, torch.random.get_rng_state())
    assert min(map_distance((teacher, jumbo()), torch.randn(2, 3, 32, 32))) > 1e-3


def test_unequal_grids():
    teacher, student = teacher_vit(patch_size=4), adventurer()
    images = torch.randn(2, 3, 32, 48)
    with pytest.raises(
        ValueError, match="teacher has a 8x12 grid of patches, student 4x6, on a 32x48 image: use resample_teacher=True"
    ):
        ViTLinearizer(teacher, student)(images)

    linearizer = ViTLinearizer(teacher, student, resample_teacher=True).eval()
    features = linearizer.features(images)
    assert features.grid == (4, 6) and features.teacher[0].shape == (2, 24, 24) == (2, 4 * 6, 24)
    assert linearizer(images)["loss"].isfinite()
    # The middle of a resized grid is a weighted mean of what lies there: on a field that rises by row and column
    # it is the field itself.
    rise = torch.arange(8.0)[:, None] * 10 + torch.arange(12.0)
    linearizer.teacher.block_outputs = lambda x, indices: {
        i: rise.reshape(1, 96, 1).expand(len(x), -1, 24).contiguous() for i in indices
    }
    resized = linearizer.features(images).teacher[0][0, :, 0].reshape(4, 6)
    expected = (torch.arange(4.0) * 2 + 0.5)[:, None] * 10 + torch.arange(6.0) * 2 + 0.5
    assert (resized[1:3, 1:5] - expected[1:3, 1:5]).abs().max() < 1e-4

    coarse = ViTLinearizer(teacher_vit(patch_size=16), adventurer(), resample_teacher=True)
    assert coarse.features(images).teacher[0].shape == (2, 24, 24)


def test_mixed_precision():
    linearizer = ViTLinearizer(teacher_vit(), adventurer()).eval()
    images, mask = torch.randn(2, 3, 32, 32), mask_of()
    expected = linearizer(images, mask)
    with torch.autocast("cpu", torch.bfloat16):
        losses = linearizer(images, mask)
    for name, loss in losses.items():
        assert loss.dtype == torch.float32 and abs(loss - expected[name]) < 3e-2
    losses["loss"].backward()
    assert linearizer.mask_token.grad.isfinite().all()


def test_compiles():
    linearizer = ViTLinearizer(teacher_vit(depth=2), jumbo(), stages=2).eval()
    images = torch.randn(2, 3, 32, 32)
    compiled = torch.compile(linearizer, backend="eager", fullgraph=True)
    losses = []
    for run in (compiled, linearizer):
        torch.manual_seed(1)  # the same random mask
        losses.append(run(images)["loss"])
    assert abs(losses[0] - losses[1]) < 1e-5


def test_gradient_checkpointing_gives_the_same_gradients():
    images, mask = torch.randn(2, 3, 32, 32), mask_of()
    plain = ViTLinearizer(teacher_vit(), adventurer())
    other = copy.deepcopy(plain)
    other.student.set_grad_checkpointing()
    for linearizer in (plain, other):
        linearizer(images, mask)["loss"].backward()
    gradients = {name: p.grad for name, p in other.named_parameters() if p.grad is not None}
    for name, p in plain.named_parameters():
        if p.grad is not None:
            assert (p.grad - gradients[name]).abs().max() < 1e-6, name


def test_students_in_transformers_models():
    pytest.importorskip("transformers")
    from hf_ext import JumboConfig, JumboForImageClassification

    model = JumboForImageClassification(
        JumboConfig(image_size=32, patch_size=8, hidden_size=16, num_hidden_layers=4, num_attention_heads=2)
    )
    linearizer = ViTLinearizer(teacher_vit(), model).eval()
    assert linearizer.student is model and linearizer.vit is model.jumbo.vit
    assert "student.jumbo.vit.pos_embed" in linearizer.state_dict()
    images, mask = torch.randn(2, 3, 32, 32), mask_of()
    expected = ViTLinearizer(linearizer.teacher, model.jumbo.vit).eval()
    weights = {k.replace("jumbo.vit.", ""): v for k, v in linearizer.state_dict().items()}
    expected.load_state_dict({k: v for k, v in weights.items() if "classifier" not in k})
    assert torch.equal(linearizer(images, mask)["loss"], expected(images, mask)["loss"])


def test_picture(tmp_path):
    matplotlib_image = pytest.importorskip("matplotlib.image")
    images = torch.randn(2, 3, 32, 48)
    linearizer = ViTLinearizer(teacher_vit(), adventurer(), stages=3)
    path = plot_activation_maps(linearizer, images, tmp_path / "new" / "maps.png", query=(0, 5))
    assert path == tmp_path / "new" / "maps.png"
    picture = matplotlib_image.imread(path)
    assert picture.shape[:2] == (840, 768)  # two images of two lines each, the photo and 3 stages
    assert picture.std() > 0.1
    other = plot_activation_maps(linearizer, images, tmp_path / "other.png")
    assert not (matplotlib_image.imread(other) == picture).all()  # another query patch

    pair = plot_activation_maps((teacher_vit(patch_size=4), adventurer(depth=2)), images[:1], tmp_path / "pair.png")
    assert matplotlib_image.imread(pair).shape[1] == 576  # as many stages as the shallower one has blocks: 2

    with pytest.raises(ValueError, match=r"query \(4, 0\) is outside of the 4x6 grid of patches"):
        plot_activation_maps(linearizer, images, tmp_path / "x.png", query=(4, 0))


@pytest.mark.parametrize(("ratio", "side"), [(0.34, 120), (0.7, 360)])
def test_every_masked_token_and_no_other_is_predicted(ratio, side):
    """0.34 of 15x15 and 0.7 of 45x45: products whose last bit depends on the order of multiplication."""
    linearizer = ViTLinearizer(teacher_vit(), adventurer(), mask_ratio=ratio).eval()
    images = torch.randn(1, 3, side, side)
    torch.manual_seed(3)
    drawn = linearizer(images)
    torch.manual_seed(3)
    given = linearizer(images, random_mask(1, (side // 8) ** 2, ratio))
    assert all(torch.equal(drawn[name], given[name]) for name in drawn)
