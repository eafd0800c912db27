"""What can be asked of the demo."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from modelexpress_rl.errors import UsageError


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The demo's settings; every size is that of the model that is trained."""

    steps: int = 5
    hidden: int = 256
    layers: int = 4
    heads: int = 8
    kv_groups: int = 2
    vocab: int = 1024
    seq: int = 64
    store: str = "memory"
    server: str | None = None
    mode: str = "IN_PLACE"
    trainer: str = "megatron"
    keep_going: bool = False
    step_timeout_s: float = 120.0

    @property
    def ffn(self) -> int:
        """The width of the gated MLP."""
        return 2 * self.hidden

    def model_arguments(self) -> dict[str, int]:
        """The model's sizes, as the demo's processes need them."""
        return {
            "hidden": self.hidden,
            "layers": self.layers,
            "heads": self.heads,
            "kv_groups": self.kv_groups,
            "ffn": self.ffn,
            "vocab": self.vocab,
            "seq": self.seq,
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the demo's options."""
    default = DemoOptions()
    parser.add_argument("--steps", type=int, default=default.steps, help="training steps, each a new version")
    parser.add_argument("--hidden", type=int, default=default.hidden, help="hidden size, a multiple of 32")
    parser.add_argument("--layers", type=int, default=default.layers, help="transformer layers")
    parser.add_argument("--vocab", type=int, default=default.vocab, help="vocabulary size, a multiple of 4")
    parser.add_argument(
        "--store", default=default.store, help="the control plane's store: memory, or sqlite:PATH"
    )
    parser.add_argument(
        "--server", default=None, metavar="HOST:PORT", help="use this control plane instead of starting one"
    )
    parser.add_argument(
        "--mode",
        default=default.mode,
        type=str.upper,
        choices=("IN_PLACE", "COPY_TO_HOST"),
        help="lend the live tensors, or a copy on the host so that training goes on while it is read",
    )
    parser.add_argument(
        "--trainer",
        default=default.trainer,
        choices=("megatron", "toy"),
        help="a Megatron-core GPT with tensor parallelism 2, or tensors that only look like one",
    )
    parser.add_argument(
        "--keep-going", action="store_true", help="go on with the next step where one fails; still exits 1"
    )


def parse(arguments: argparse.Namespace) -> DemoOptions:
    """Check the arguments that `add_arguments` declared.

    Raises:
        UsageError: a size does not fit the sharding of the demo; the message names the option.
    """
    for name, least, multiple in (("steps", 1, 1), ("hidden", 32, 32), ("layers", 1, 1), ("vocab", 4, 4)):
        value = getattr(arguments, name)
        if value < least or value % multiple:
            raise UsageError(f"--{name} must be at least {least} and a multiple of {multiple}, not {value}")
    return DemoOptions(
        steps=arguments.steps,
        hidden=arguments.hidden,
        layers=arguments.layers,
        vocab=arguments.vocab,
        store=arguments.store,
        server=arguments.server,
        mode=arguments.mode,
        trainer=arguments.trainer,
        keep_going=arguments.keep_going,
    )
