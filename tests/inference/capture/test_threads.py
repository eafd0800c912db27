"""What other threads do to captured tensors is refused by name, and what they do else is let pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from modelexpress_rl.inference.engines.torch.capture import CaptureRefused
from tests.inference.capture.support import Loads, captured, numbered, parameter

START, SUBMIT = threading.Thread.start, ThreadPoolExecutor.submit


@pytest.fixture(autouse=True)
def _nothing_stays_behind() -> Iterator[None]:
    yield
    assert threading.Thread.start is START
    assert ThreadPoolExecutor.submit is SUBMIT


def in_a_pool(work: Callable[..., Any], *args: Any) -> Any:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, *args))


def in_a_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def halves_of_a_staging_tensor(self: Any, named: dict[str, torch.Tensor]) -> None:
    w = named["w"]
    staging = torch.zeros_like(self.p)
    in_a_pool(lambda half: staging[2 * half : 2 * half + 2].copy_(w[2 * half : 2 * half + 2]), range(2))
    self.p.data.copy_(staging)


def a_buffer(self: Any, named: dict[str, torch.Tensor]) -> None:
    w = named["w"]
    self.p.data.copy_(w)
    in_a_pool(lambda _: self.scale.copy_(w[0, :1]), range(1))


def over_what_is_there(self: Any, named: dict[str, torch.Tensor]) -> None:
    w = named["w"]
    self.p.data.copy_(w)
    in_a_thread(lambda: self.p.data.zero_())


def a_view(self: Any, named: dict[str, torch.Tensor]) -> None:
    w = named["w"]
    found: list[torch.Tensor] = []
    in_a_thread(lambda: found.append(w.t()))
    self.p.data.copy_(w)


def in_a_pool_that_was_there(self: Any, named: dict[str, torch.Tensor]) -> None:
    w = named["w"]
    POOL.submit(self.p.data.copy_, w).exception()  # an error that nobody looks at


# Not in closures, of which a twin has copies.
BEGUN, MAY_END = threading.Event(), threading.Event()
KEPT: list[ThreadPoolExecutor] = []
POOL = ThreadPoolExecutor(1)
POOL.submit(int).result()


@pytest.mark.parametrize(
    "load",
    [halves_of_a_staging_tensor, a_buffer, over_what_is_there, a_view, in_a_pool_that_was_there],
    ids=lambda load: load.__name__,
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_they_do_to_captured_tensors_is_refused(load: Any) -> None:
    module = Loads(load, p=parameter(4, 6))
    module.register_buffer("scale", torch.ones(1))
    with pytest.raises(CaptureRefused, match=r"aten\.\w+.* on .* in another thread than its own"):
        captured(module, numbered(w=(4, 6)))


def test_files_may_be_read_and_other_tensors_made(tmp_path: Path) -> None:
    (tmp_path / "names").write_text("w")

    def load(self: Any, named: dict[str, torch.Tensor]) -> None:
        w = named["w"]
        assert in_a_pool(lambda path: path.read_text(), [tmp_path / "names"]) == ["w"]
        assert in_a_pool(lambda n: float(torch.ones(n).sum()), [3]) == [3.0]
        self.p.data.copy_(w)

    captured(Loads(load, p=parameter(4, 6)), numbered(w=(4, 6)))


def test_threads_of_others_and_of_later_are_left_alone() -> None:
    def load(self: Any, named: dict[str, torch.Tensor]) -> None:
        w = named["w"]
        BEGUN.set()
        assert MAY_END.wait(10)
        KEPT.append(ThreadPoolExecutor(1))
        KEPT[0].submit(int).result()
        self.p.data.copy_(w)

    module = Loads(load, p=parameter(4, 6))
    with ThreadPoolExecutor(1) as capturing:
        done = capturing.submit(captured, module, numbered(w=(4, 6)))
        assert BEGUN.wait(10)
        live = torch.zeros(2)
        in_a_thread(lambda: live.add_(1))
        # Another capture begins and ends meanwhile.
        other = Loads(lambda self, named: self.p.data.copy_(named["w"]), p=parameter(4, 6))
        captured(other, numbered(w=(4, 6)))
        MAY_END.set()
        done.result()
    assert live.tolist() == [1, 1]
    assert KEPT[0].submit(lambda: module.p.data.add_(1)).result().tolist()
    KEPT[0].shutdown()
