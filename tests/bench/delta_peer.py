"""0.7.0's codec of deltas in an interpreter of its own: `delta_peer.py FOLDER THREADS REPEATS CASE...`.

Encoding is done by its public functions, spread over threads by its own helper, tensor by tensor as its
trainer does. Its decoder can't be called without a download and files; so the documented format is decoded
here, in memory, with nothing around it: that is generous to the peer.
"""

import json
import os
import sys
import time
import zlib
from pathlib import Path


def main() -> None:
    folder, threads, repeats = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    os.environ["MX_REFIT_DELTA_WORKERS"] = str(threads)
    import numpy as np
    import zstandard

    from modelexpress_rl import utils

    tensors = json.loads((folder / "tensors.json").read_text())

    def split(name: str) -> list:
        return np.array_split(np.fromfile(folder / f"{name}.bin", np.uint8), tensors)

    def encode(pair: tuple) -> tuple:
        base, new = pair
        delta, _ = utils.compute_delta(new, base)
        checksum = utils.checksum_factory("adler32")
        checksum.update(new)
        return utils.compress_delta(delta), checksum.hexdigest()

    def decode(item: tuple) -> np.ndarray:
        base, (frame, checksum) = item
        new = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), np.uint8) ^ base
        assert f"{zlib.adler32(new):08x}" == checksum
        return new

    def over(items: list, work: object) -> tuple:
        begun = time.perf_counter()
        made = list(utils.threadpool_map(items, work, max_workers=threads, thread_name_prefix="bench"))
        return made, time.perf_counter() - begun

    base = split("base")
    total = sum(part.nbytes for part in base)
    figures = {}
    for case in sys.argv[4:]:
        new = split(case)
        encoded_s, decoded_s = [], []
        for _ in range(repeats):
            frames, took = over(list(zip(base, new, strict=True)), encode)
            encoded_s.append(took)
            made, took = over(list(zip(base, frames, strict=True)), decode)
            decoded_s.append(took)
        assert all(np.array_equal(left, right) for left, right in zip(made, new, strict=True))
        sizes = sum(memoryview(frame).nbytes for frame, _ in frames)
        figures[case] = {
            "peer_ratio": total / sizes,
            "peer_encode_gb_s": total / min(encoded_s) / 1e9,
            "peer_decode_gb_s": total / min(decoded_s) / 1e9,
        }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
