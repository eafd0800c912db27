"""The parts of the Redis store that need no Redis: keys, addresses, troubles, time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("redis", reason="the extra 'redis' is not installed")

from redis.exceptions import AuthenticationError, BusyLoadingError, MovedError, ResponseError

from modelexpress_rl.errors import UsageError
from modelexpress_rl.server.stores import open_store, shown
from modelexpress_rl.server.stores.redis import clock, keys, scripts, trouble
from modelexpress_rl.server.stores.redis.address import parse
from modelexpress_rl.server.stores.redis.clock import StoreTime
from modelexpress_rl.server.stores.redis.keys import Bucket, Buckets
from modelexpress_rl.server.stores.redis.trouble import Cure
from tests.store.records import ODD_IDS, texts
from tests.store.virtual_clock import VirtualClock

odd = st.text(st.sampled_from("a\0\1{}:%é"), max_size=6) | texts
places = st.tuples(odd, st.integers(0, 2**63 - 1), odd)


class TestKeys:
    @given(st.lists(places, unique=True))
    def test_listings_sort_as_the_tuples_do_and_say_them_again(
        self, versions: list[tuple[str, int, str]]
    ) -> None:
        members = sorted(keys.version_member(*version) for version in versions)
        assert [keys.version_of(member) for member in members] == sorted(versions)

    @given(places, odd)
    def test_a_models_range_holds_its_own_only(self, version: tuple[str, int, str], model: str) -> None:
        least, most = keys.model_range(model)
        member = keys.version_member(*version)
        assert (least[1:] <= member < most[1:]) is (version[0] == model)
        worker = keys.worker_member(version[0], version[2])
        assert (least[1:] <= worker < most[1:]) is (version[0] == model)
        assert keys.worker_of(worker) == version[2]

    @given(places, places)
    def test_a_page_goes_on_after_the_last_one(
        self, version: tuple[str, int, str], after: tuple[str, int, str]
    ) -> None:
        bound = keys.after_sequence(*after[:2])
        assert (keys.version_member(*version) > bound[1:]) is (version[:2] > after[:2])

    @given(odd, odd)
    def test_no_name_is_taken_for_another_or_ends_a_hash_tag(self, one: str, other: str) -> None:
        bucket = Bucket("mx-rl.3")
        made = [key for name in {one, other} for key in (bucket.version(name), bucket.worker(name))]
        made += [bucket.idempotency(name) for name in {one, other}]
        made += [*bucket.shared, bucket.meta, bucket.sweeper]
        assert len(set(made)) == len(made)
        for key in made:
            assert key.startswith("{mx-rl.3}:")
            assert (key.count("{"), key.count("}")) == (1, 1)
            assert key.isprintable()

    def test_a_clusters_buckets_share_its_slots_evenly(self) -> None:
        buckets = Buckets("mx-rl", cluster=True)
        slots = [keys.slot_of(bucket.tag) for bucket in buckets.all]
        width = keys.SLOTS // keys.CLUSTER_BUCKETS
        assert [slot // width for slot in slots] == list(range(keys.CLUSTER_BUCKETS))
        used = Counter(buckets.number_of(f"version-{n}") for n in range(3_200))
        assert min(used.values()) > 50
        assert {Buckets("mx-rl", cluster=False).number_of(name) for name in ODD_IDS} == {0}

    def test_a_known_slot(self) -> None:
        assert keys.slot_of("123456789") == 0x31C3  # the check value of CRC-16/XMODEM, below 16384


class TestAddresses:
    def test_what_there_is(self) -> None:
        one = parse("redis://h:7/3?prefix=job1&replicas=2")
        assert (one.endpoints, one.database, one.prefix, one.replicas) == ((("h", 7),), 3, "job1", 2)
        assert (one.cluster, one.tls, one.password) == (False, False, None)
        many = parse("redis-cluster://a:1,b,[::1]:3")
        assert many.endpoints == (("a", 1), ("b", 6379), ("::1", 3))
        assert many.cluster
        assert parse("rediss://h").tls

    def test_passwords_are_not_shown(self, tmp_path: Path) -> None:
        secret = "s3cr%2Ft"
        address = parse(f"redis://me:{secret}@h:1/0")
        assert (address.username, address.password) == ("me", "s3cr/t")
        assert address.shown == "redis://h:1/0"
        assert "s3cr" not in repr(address)
        assert shown(f"redis://me:{secret}@h:1,i:2/0?prefix=p") == "redis://h:1,i:2/0?prefix=p"
        assert shown("sqlite:/a/b") == "sqlite:/a/b"
        file = tmp_path / "password"
        file.write_text("from file\n")
        assert parse(f"redis://h?password_file={file}").password == "from file"
        with pytest.raises(UsageError) as raised:
            open_store(f"redis://me:{secret}@h:port/0")
        assert "s3cr" not in str(raised.value)

    @pytest.mark.parametrize(
        ("address", "words"),
        [
            ("redis://", "can't be understood"),
            ("redis://h:0x/0", "can't be understood"),
            ("redis://h/zero", "can't be understood"),
            ("redis-cluster://a,b/1", "database 0 only"),
            ("redis://h?prefix={x}", "without braces"),
            ("redis://h?replicas=-1", "replicas of the Redis store"),
            ("redis://h?retries=3", "no option 'retries'"),
            ("redis://h?password_file=/missing/file", "password_file"),
            ("redis://h?ssl_ca_certs=/etc", "for rediss:// only"),
            ("rediss://h?ssl_ca_certs=/missing", "is no file"),
        ],
    )
    def test_what_there_is_not(self, address: str, words: str) -> None:
        with pytest.raises(UsageError, match=words):
            open_store(address)


class TestTroubles:
    @pytest.mark.parametrize(
        ("error", "cure", "words"),
        [
            (ResponseError("BUSY Redis is busy running a script."), Cure.AGAIN, "SCRIPT KILL"),
            (BusyLoadingError("Redis is loading the dataset in memory"), Cure.AGAIN, "loading"),
            (ResponseError("NOREPLICAS Not enough good replicas to write."), Cure.AGAIN, "min-replicas"),
            (ResponseError("MISCONF Redis is configured to save RDB snapshots"), Cure.AGAIN, "disk"),
            (ResponseError("TRYAGAIN Multiple keys request during rehashing"), Cure.AGAIN, "moving"),
            (
                ResponseError("CROSSSLOT Keys in request don't hash"),
                Cure.NONE,
                "refuses a command: CROSSSLOT",
            ),
            (AuthenticationError("invalid username-password pair"), Cure.NONE, "refuses a command: invalid"),
            (ConnectionError("reset"), Cure.UNKNOWN, "broke the connection: reset"),
            # Before 7.0 the error of a script hides the code of the command that failed.
            (
                ResponseError("Error running script (call to f_0): @user_script:9: -OOM command not allowed"),
                Cure.NONE,
                "out of memory",
            ),
            (
                ResponseError(
                    "Error running script (call to f_0): @user_script:9: -READONLY You can't write"
                ),
                Cure.RECONNECT,
                "read-only replica",
            ),
        ],
    )
    def test_what_a_reply_means(self, error: Exception, cure: Cure, words: str) -> None:
        found = trouble.of_error(error)
        assert found.cure is cure
        assert words in found.words

    def test_redirections_say_where(self) -> None:
        moved = trouble.of_error(MovedError("3999 127.0.0.1:6381"))
        assert (moved.cure, moved.place) == (Cure.ROUTE, "127.0.0.1:6381")
        hidden = trouble.of_error(ResponseError("ASK 3999 127.0.0.1:6381"))
        assert (hidden.cure, hidden.place) == (Cure.ASK, "127.0.0.1:6381")


class TestTime:
    def test_it_goes_on_by_itself_and_never_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        steady = 5_000
        monkeypatch.setattr(clock, "_steady_ms", lambda: steady)
        time = StoreTime(None)
        assert time.arguments() == ("", 0)
        assert time.heard(1_000_000) == 1_000_000
        steady += 30
        assert time.arguments() == ("", 1_000_030)
        time.heard(999_000)  # a node that is behind
        assert time.least_ms() == 1_000_030
        time.heard(2_000_000)
        assert time.least_ms() == 2_000_000

    def test_a_tests_clock_rules(self) -> None:
        given = VirtualClock(77)
        time = StoreTime(given)
        time.heard(10**15)
        assert time.arguments() == (77, 0)
        assert time.now_ms() == 77


def test_scripts_are_named_by_what_they_are() -> None:
    found = {name: one for name, one in vars(scripts).items() if isinstance(one, scripts.Script)}
    assert len({one.digest for one in found.values()}) == len(found) >= 9
    assert all(len(one.digest) == 40 for one in found.values())
