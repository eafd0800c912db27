"""Worlds with digests: hashed as a trainer does, asked for and checked as a generator does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from modelexpress_rl.reshard.digests import DigestTable, GridRule, digest_table
from modelexpress_rl.reshard.geometry import Bytes, Int, Source
from modelexpress_rl.reshard.grid import FINER, Selection, digest_grid, grid_of_table
from modelexpress_rl.reshard.hashing import ShardDigests, ShardHasher, decode_answer, encode_answer
from modelexpress_rl.reshard.merge import SourceManifest
from modelexpress_rl.reshard.needs import NeedTable
from modelexpress_rl.reshard.plan import Plan
from modelexpress_rl.reshard.planner import plan
from modelexpress_rl.reshard.split import split
from modelexpress_rl.reshard.verify import Verified, Verifier
from tests.reshard.reference import World, address, publish, pull

FINE = GridRule(min_tile_bytes=64, fine_tile_bytes=64)
SHA = "cd" * 32


def never() -> bool:
    return False


def memory_of(world: World, number: int) -> Callable[[int], np.ndarray]:
    table, buffer = world.manifests[number].manifest.table, world.buffers[number]

    def memory(row: int) -> np.ndarray:
        at = int(table.addr[row]) - address(buffer)
        return buffer[at : at + int(table.size_bytes[row])]

    return memory


def digest_tables(world: World, rule: GridRule = FINE) -> dict[Source, DigestTable]:
    """Whole tables, as a publisher makes them that knows no selection."""
    return {
        m.source: digest_table(m.manifest.table, memory_of(world, i), rule=rule)
        for i, m in enumerate(world.manifests)
    }


def one_tensor(shape: tuple[int, ...], *boxes: tuple[tuple[int, ...], tuple[int, ...]], dtype: str) -> World:
    elsize = {"torch.bfloat16": 2, "torch.float32": 4, "torch.uint8": 1}[dtype]
    data = np.random.default_rng(1).integers(0, 256, (*shape, elsize), np.uint8)
    return publish({"t": (dtype, data)}, [[("t", offset, size)] for offset, size in boxes])


@dataclass
class Answering:
    """One publisher: its hasher is kept, `answer` hashes what is asked for."""

    manifest: SourceManifest
    hasher: ShardHasher

    def answer(self, selection: Selection) -> bytes:
        made = ShardDigests(self.hasher)
        for unit in range(len(self.hasher.units)):
            self.hasher.hash_slabs(unit, made, never)
        for level in FINER:
            there = selection.wanted[level] & (self.hasher.grid.count[level, selection.rows] > 0)
            rows = selection.first_row + np.flatnonzero(there)
            self.hasher.hash_parts(level, rows.tolist(), made, never)
        return encode_answer(made.gather(selection), selection, SHA)


def answering(world: World, rule: GridRule = FINE, *, fixed: bool = True) -> dict[Source, Answering]:
    return {
        m.source: Answering(m, ShardHasher(m.manifest.table, memory_of(world, i), fixed=fixed, rule=rule))
        for i, m in enumerate(world.manifests)
    }


@dataclass
class Checker:
    """All verifiers of one plan, with the digests of a version."""

    plan: Plan
    verifiers: dict[Source, Verifier]
    digests: dict[Source, Bytes]

    @property
    def coverage(self) -> Verified:
        total = Verified(0, 0)
        for verifier in self.verifiers.values():
            total += verifier.coverage()
        return total

    def verify(self, arena: Bytes) -> Verified:
        total = Verified(0, 0)
        for source, verifier in self.verifiers.items():
            total += verifier.verify(arena, self.digests[source])
        return total

    def verify_piece(self, arena: Bytes, piece: int) -> Verified:
        for source, verifier in self.verifiers.items():
            if verifier.first <= piece < verifier.first + len(verifier.pieces):
                return verifier.verify(arena, self.digests[source], np.array([piece]))
        raise AssertionError(piece)

    def fetch(self, publishers: dict[Source, Answering]) -> None:
        """Ask for what is needed, as a reader does for every version."""
        for source, verifier in self.verifiers.items():
            publisher = publishers[source]
            answers = [
                decode_answer(publisher.answer(ask), ask, publisher.hasher.grid, SHA) for ask in verifier.asks
            ]
            self.digests[source] = np.concatenate([np.zeros((0, 16), np.uint8), *answers])


def checker(
    world: World,
    needs: NeedTable,
    rule: GridRule = FINE,
    *,
    whole: bool = False,
    limit_bytes: int = 1 << 30,
    reads: Int | None = None,
) -> Checker:
    """The checks of the plan for `needs`; `whole`: against tables of publishers that know no selection.

    `reads`: the pieces with which reads begin, see `Verifier.of`.
    """
    merged = world.merged()
    made = split(plan(needs, merged), merged, limit_bytes)
    tables = digest_tables(world, rule)
    out = Checker(made, {}, {})
    for m in world.manifests:
        own = [reads for reads in made.reads if reads.source == m.source]
        if not own:
            continue
        grid = grid_of_table(tables[m.source]) if whole else digest_grid(m.manifest.table, rule)
        pieces = slice(own[0].first, own[-1].last)
        out.verifiers[m.source] = Verifier.of(made, needs, merged, pieces, grid, reads=reads, at_once=whole)
        out.digests[m.source] = tables[m.source].digests
    if not whole:
        out.fetch(answering(world, rule))
    return out


def pulled(
    world: World, needs: NeedTable, rule: GridRule = FINE, *, whole: bool = False, reads: Int | None = None
) -> tuple[Checker, Bytes]:
    """The checks, and an arena into which everything was read."""
    made = checker(world, needs, rule, whole=whole, reads=reads)
    arena = np.zeros(needs.arena_bytes, np.uint8)
    pull(made.plan, arena)
    return made, arena
