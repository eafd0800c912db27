"""Generators of that model, TP 2 and EP 2: their parameters, and what these must hold.

Parameters are laid out as inference engines lay them: q, k and v fused, the experts stacked into
w13 (expert, gate and up rows, hidden) and w2 (expert, hidden, ffn). What they must hold is made from the
trainer's raw parameters by code of its own, which shares nothing with the package.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from modelexpress_rl.inference.engines.torch import TensorSlice
from tests.e2e.moe_model import EXPERTS, FFN, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, RANKS, SEQ, VOCAB

Tensors = dict[str, torch.Tensor]


def hugging_face(raw: list[Tensors]) -> Tensors:
    """The whole model under Hugging Face names, from the raw parameters of the trainer's ranks."""
    first = raw[0]

    def joined(name: str, axis: int) -> torch.Tensor:
        return torch.cat([rank[name] for rank in raw], dim=axis)

    out = {
        "model.embed_tokens.weight": joined("embedding.word_embeddings.weight", 0),
        "model.embed_positions.weight": first["embedding.position_embeddings.weight"],
        "model.norm.weight": first["decoder.final_layernorm.weight"],
        "lm_head.weight": joined("output_layer.weight", 0),
    }
    for layer in range(LAYERS):
        here, there = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        # By KV group: the group's q heads, then its k head, then its v head.
        fused = joined(f"{here}self_attention.linear_qkv.weight", 0)
        groups = fused.view(KV_HEADS, HEADS // KV_HEADS + 2, HEAD_DIM, HIDDEN)
        out[f"{there}self_attn.q_proj.weight"] = groups[:, :-2].reshape(-1, HIDDEN)
        out[f"{there}self_attn.k_proj.weight"] = groups[:, -2].reshape(-1, HIDDEN)
        out[f"{there}self_attn.v_proj.weight"] = groups[:, -1].reshape(-1, HIDDEN)
        out[f"{there}self_attn.o_proj.weight"] = joined(f"{here}self_attention.linear_proj.weight", 1)
        out[f"{there}input_layernorm.weight"] = first[f"{here}input_layernorm.weight"]
        out[f"{there}post_attention_layernorm.weight"] = first[f"{here}pre_mlp_layernorm.weight"]
        out[f"{there}mlp.gate.weight"] = first[f"{here}mlp.router.weight"]
        per_rank = EXPERTS // RANKS
        for expert in range(EXPERTS):
            mine = raw[expert // per_rank]
            local = f"{here}mlp.experts.local_experts.{expert % per_rank}."
            gate, up = mine[f"{local}linear_fc1.weight"].chunk(2)
            out[f"{there}mlp.experts.{expert}.gate_proj.weight"] = gate
            out[f"{there}mlp.experts.{expert}.up_proj.weight"] = up
            out[f"{there}mlp.experts.{expert}.down_proj.weight"] = mine[f"{local}linear_fc2.weight"]
    return out


@dataclass(frozen=True, slots=True)
class Part:
    """One rank of a generator: of `tp_size` by tensor parallelism, of `ep_size` by experts."""

    tp_size: int = 1
    tp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0

    @property
    def experts(self) -> range:
        """The experts that it holds."""
        count = EXPERTS // self.ep_size
        return range(self.ep_rank * count, (self.ep_rank + 1) * count)

    def expected(self, whole: Tensors) -> Tensors:
        """What its parameters must hold for the whole model."""

        def cut(name: str, axis: int) -> torch.Tensor:
            return whole[name].chunk(self.tp_size, dim=axis)[self.tp_rank]

        out = {
            "model.embed_tokens.weight": cut("model.embed_tokens.weight", 0),
            "model.embed_positions.weight": whole["model.embed_positions.weight"],
            "model.norm.weight": whole["model.norm.weight"],
            "lm_head.weight": cut("lm_head.weight", 0),
        }
        for layer in range(LAYERS):
            at = f"model.layers.{layer}."
            for same in ("input_layernorm", "post_attention_layernorm", "mlp.gate"):
                out[f"{at}{same}.weight"] = whole[f"{at}{same}.weight"]
            qkv = [cut(f"{at}self_attn.{part}_proj.weight", 0) for part in "qkv"]
            out[f"{at}self_attn.qkv_proj.weight"] = torch.cat(qkv)
            out[f"{at}self_attn.o_proj.weight"] = cut(f"{at}self_attn.o_proj.weight", 1)
            w13, w2 = [], []
            for expert in self.experts:
                name = f"{at}mlp.experts.{expert}."
                w13.append(torch.cat([cut(f"{name}{part}_proj.weight", 0) for part in ("gate", "up")]))
                w2.append(cut(f"{name}down_proj.weight", 1))
            out[f"{at}mlp.experts.w13_weight"] = torch.stack(w13)
            out[f"{at}mlp.experts.w2_weight"] = torch.stack(w2)
        return out

    def module(self) -> torch.nn.Module:
        """Its parameters, zero until something is installed."""
        whole = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        module = torch.nn.Module()
        for name, tensor in self.expected(whole).items():
            *parents, leaf = name.split(".")
            owner = module
            for parent in parents:
                if not hasattr(owner, parent):
                    owner.add_module(parent, torch.nn.Module())
                owner = owner.get_submodule(parent)
            owner.register_parameter(leaf, torch.nn.Parameter(tensor.clone(), requires_grad=False))
        return module

    def slices(self) -> list[TensorSlice]:
        """Which box of which Hugging Face tensor lies where."""
        out = []

        def add(name: str, axis: int | None, parameter: str | None = None, *at: int) -> None:
            shape, begin = list(SHAPES[name]), [0] * len(SHAPES[name])
            if axis is not None:
                shape[axis] //= self.tp_size
                begin[axis] = self.tp_rank * shape[axis]
            out.append(
                TensorSlice(
                    name, parameter or name, tuple(begin), tuple(shape), at or None, False, SHAPES[name]
                )
            )

        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            add(name, 0)
        for name in ("model.embed_positions.weight", "model.norm.weight"):
            add(name, None)
        for layer in range(LAYERS):
            at = f"model.layers.{layer}."
            for same in ("input_layernorm", "post_attention_layernorm", "mlp.gate"):
                add(f"{at}{same}.weight", None)
            row = 0
            for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
                add(f"{at}self_attn.{part}_proj.weight", 0, f"{at}self_attn.qkv_proj.weight", row, 0)
                row += heads * HEAD_DIM // self.tp_size
            add(f"{at}self_attn.o_proj.weight", 1)
            for number, expert in enumerate(self.experts):
                name, stacked = f"{at}mlp.experts.{expert}.", f"{at}mlp.experts."
                add(f"{name}gate_proj.weight", 0, f"{stacked}w13_weight", number, 0, 0)
                add(f"{name}up_proj.weight", 0, f"{stacked}w13_weight", number, FFN // self.tp_size, 0)
                add(f"{name}down_proj.weight", 1, f"{stacked}w2_weight", number, 0, 0)
        return out


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.embed_positions.weight": (SEQ, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}input_layernorm.weight": (HIDDEN,),
            f"{at}post_attention_layernorm.weight": (HIDDEN,),
            f"{at}mlp.gate.weight": (EXPERTS, HIDDEN),
            f"{at}self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        }
        for expert in range(EXPERTS):
            shapes |= {
                f"{at}mlp.experts.{expert}.gate_proj.weight": (FFN, HIDDEN),
                f"{at}mlp.experts.{expert}.up_proj.weight": (FFN, HIDDEN),
                f"{at}mlp.experts.{expert}.down_proj.weight": (HIDDEN, FFN),
            }
    return shapes


SHAPES = _shapes()
"""Every tensor of the whole model under its Hugging Face name."""
