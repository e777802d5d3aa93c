"""Configuration of the Jumbo vision models for Transformers (model type "jumbo_vit").

Annotations are kept as types, not strings: the host checks every field against them.
"""

from typing import Any

from huggingface_hub.dataclasses import strict

from hf_ext.configuration_vision import Integer, Number, VisionConfig
from jumbo_core import checks


@strict
class JumboConfig(VisionConfig):
    """Shape and training options of a Jumbo ViT. The defaults are the released small model (66.9 M parameters).

    Every argument is a keyword. Source of the defaults: Jumbo paper (arXiv 2502.15021 v3) and its released code.

    Args:
        image_size: size the position table is made for, int or (H, W). Other sizes run too. Default 224.
        patch_size: int or (h, w). Default 16.
        num_channels: input channels. Default 3.
        hidden_size: patch width D. Default 384.
        num_hidden_layers: blocks. Default 12.
        num_attention_heads: heads; must divide ``hidden_size``. Default 6.
        multiplier: J, width of the Jumbo token in patches; 0 = an ordinary class token. Default 6.
        registers: register tokens. Default 0; the paper's baseline is ``multiplier=0, registers=16``.
        mlp_ratio, jumbo_mlp_ratio: hidden widths of the two FFNs over D and over J*D. Default 4.
        share_jumbo_ffn: one Jumbo FFN for all blocks. Default True.
        layer_scale: initial LayerScale value, or None (default) for none.
        drop_path_rate: stochastic depth, one rate for every block (default 0.1, as released) or one per block.
        hidden_dropout_prob: dropout after the positions and after linear layers. Default 0.
        attention_probs_dropout_prob: dropout of attention weights. Default 0.
        patch_drop_rate: share of patches dropped at random in training. Default 0; see
            :class:`hf_ext.PatchDropSchedule` for a schedule.
        layer_norm_eps: LayerNorm epsilon. Default 1e-5.
        dynamic_img_pad: pad right and bottom to a multiple of the patch size instead of refusing. Default False.
        init: "released" (head weights 0, head bias -ln(classes): long runs) or "short" (head weights trunc-normal,
            Jumbo FFN output 0: short runs and fine-tuning). Default "released".
        apply_layernorm: as a backbone, pass every feature map through the final norm. Default True.
        out_features, out_indices: as a backbone, stages to return, of "stem", "stage1" … "stageN". Default the last.
        optimize: "int8" or "bfloat16": the form of the Jumbo FFN's weights, for prediction alone, as
            ``jumbo_core.optimize_for_inference`` made them; ``from_pretrained(folder, optimize="int8")`` makes them of
            a trained model. Default None: as trained.
        tofu: token fusion that ``from_pretrained`` applies, as ``apply_tofu`` writes it here. Default None.
        **kwargs: everything else a Transformers configuration takes (``num_labels``, ``id2label``, …).

    Raises:
        ValueError: a value outside its range, named with what was expected.
    """

    model_type = "jumbo_vit"
    family = "Jumbo"

    num_attention_heads: Integer = 6
    multiplier: Integer = 6
    registers: Integer = 0
    layer_scale: Number | None = None
    drop_path_rate: Number | list[Number] | tuple[Number, ...] = 0.1
    attention_probs_dropout_prob: Number = 0.0
    tofu: dict[str, Any] | None = None

    def check(self) -> None:
        """As for any configuration of ours, and the fields of this one."""
        super().check()
        self.num_attention_heads = checks.integer("num_attention_heads", self.num_attention_heads)
        self.registers = checks.integer("registers", self.registers, 0)
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not divisible by num_attention_heads {self.num_attention_heads}"
            )
        if self.layer_scale is not None:
            self.layer_scale = checks.positive("layer_scale", self.layer_scale)
        self.attention_probs_dropout_prob = checks.rate(
            "attention_probs_dropout_prob", self.attention_probs_dropout_prob
        )

    def core_arguments(self) -> dict[str, Any]:
        """What a :class:`jumbo_core.models.JumboViT` of this shape is made with, ``num_classes`` aside."""
        return super().core_arguments() | dict(
            num_heads=self.num_attention_heads,
            registers=self.registers,
            layer_scale=self.layer_scale,
            attn_drop_rate=self.attention_probs_dropout_prob,
        )
