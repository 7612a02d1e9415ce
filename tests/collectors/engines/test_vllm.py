"""vLLM's command lines, and how its endpoint is asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.doubles.http_server import FakeVllm

from gpuidle.agent.model import EngineLimits, Parallelism
from gpuidle.collectors.engines.rule import Settings
from gpuidle.collectors.engines.vllm import KIND, VllmAdapter, is_root, settings
from gpuidle.collectors.engines.vllm_page import FAST, QUICK, SLOW
from gpuidle.collectors.support.http import HttpClient, HttpError

DATA = Path(__file__).parents[2] / "data" / "vllm"
SECOND = 1_000_000_000


def page(name: str) -> str:
    return next(DATA.glob(f"metrics_{name}_*.txt")).read_text()


def told(*words: str, config: str | None = None) -> Settings:
    return settings(["/usr/bin/python3", "/usr/bin/vllm", "serve", *words], lambda _name: config)


@pytest.mark.parametrize(
    "line",
    [
        "/opt/venv/bin/python /opt/venv/bin/vllm serve m",
        "vllm serve m",
        "python3.12 -m vllm.entrypoints.openai.api_server --model m",
        "python -B -X dev -W error -m vllm.entrypoints.openai.api_server --model m",
        "python3 -m vllm.entrypoints.cli.main serve m",
        "python3 -m vllm serve m",
        "python3 /usr/lib/python3/vllm/entrypoints/openai/api_server.py --model m",
        "python3.13t -u -m vllm.entrypoints.api_server --model m",
    ],
)
def test_a_command_line_that_starts_a_server_is_recognised(line: str) -> None:
    assert is_root(line.split())


@pytest.mark.parametrize(
    "line",
    [
        "",
        "vllm chat",
        "vllm",
        "python",
        "python -m",
        "python -m vllm",
        "python -m sglang.launch_server",
        "python my_vllm.entrypoints.py",
        "grep vllm serve",
        "tail -f /var/log/vllm/entrypoints/x.py",
        "sudo vllm serve m",
        "VLLM::EngineCore",
    ],
)
def test_another_command_line_is_not(line: str) -> None:
    assert not is_root(line.split())


def test_a_shell_that_only_names_the_command_is_no_server() -> None:
    assert not is_root(["bash", "-c", "vllm serve m"])


@pytest.mark.parametrize(
    "title", ["VLLM::EngineCore", "VLLM::Worker_TP0", "mine::EngineCore_DP1", "VLLM::APIServer_0"]
)
def test_titles_of_children_are_known_under_any_prefix(title: str) -> None:
    assert KIND.rule.is_part(title)
    assert KIND.rule.is_front_end(title) == ("APIServer" in title)


def test_titles_of_other_engines_are_not() -> None:
    assert not KIND.rule.is_part("sglang::scheduler_TP0")


def test_flags_in_all_their_forms() -> None:
    line = (
        "org/model --port=9001 -tp 2 -pp=3 --data_parallel_size 4 --enable-expert-parallel --block-size 32 "
        "--max-num-batched-tokens 8K --max-num-seqs=1.5k -q awq --kv-cache-dtype fp8 --dtype float16 "
        "--speculative-config.method ngram --api-server-count 2 --served-model-name a b --revision r "
        "--hf-config-path /c --download-dir /d"
    )
    got = told(*line.split())
    assert (got.model, got.served_model, got.port, got.front_ends) == ("org/model", "a", 9001, 2)
    assert got.parallelism == Parallelism(tensor=2, pipeline=3, data=4, expert=True)
    limits = got.limits
    assert (limits.max_batched_tokens, limits.max_sequences, limits.kv_block_tokens) == (8192, 1500, 32)
    assert (limits.dtype, limits.kv_dtype, limits.quantization, limits.speculative) == (
        "float16",
        "fp8",
        "awq",
        True,
    )
    assert (got.revision, got.config_path, got.download_dir) == ("r", "/c", "/d")
    assert got.blind is None


@pytest.mark.parametrize("options", ["-dpl 4 -dpr 8", "-dpn 3 -dpa 10.0.0.1", "-dph -cc 3", "-dcp 2 -dpe"])
def test_the_value_of_a_short_option_is_no_model(options: str) -> None:
    assert told(*options.split(), "org/model").model == "org/model"


def test_what_is_not_said_is_the_documented_default_or_unknown() -> None:
    got = told("--enforce-eager", "m")
    assert (got.model, got.served_model, got.port, got.scheme) == ("m", "m", 8000, "http")
    assert got.limits.max_batched_tokens is None
    assert got.limits.max_sequences is None
    assert got.limits.speculative is False


@pytest.mark.parametrize(
    ("options", "ahead"),
    [
        ("", None),
        ("--async-scheduling", True),
        ("--no-async-scheduling", False),
        ("--speculative-config.method ngram", False),
        ('--speculative-config {"method":"ngram","num_speculative_tokens":3}', False),
        ('--speculative-config {"method":"eagle"}', None),
        ("--speculative-config {", None),
        ('--async-scheduling --speculative-config {"method":"ngram"}', True),
    ],
)
def test_whether_steps_are_scheduled_ahead(options: str, ahead: bool | None) -> None:
    assert told("m", *options.split()).limits.async_scheduling is ahead


@pytest.mark.parametrize(
    ("version", "told_by_flags", "ahead"),
    [
        ("0.13.0", None, False),
        ("0.9.2.dev1", None, False),
        ("0.14.0rc1", None, None),
        ("0.1.dev1+g1a2b3c4", None, None),
        ("1.0.0", None, None),
        ("0.32.0+cpu", None, False),
        ("0.13.0", True, True),
        ("dev", None, None),
    ],
)
def test_older_versions_schedule_between_steps(
    version: str,
    told_by_flags: bool | None,
    ahead: bool | None,
) -> None:
    fake = FakeVllm(page("0"), version=version)
    limits = EngineLimits(async_scheduling=told_by_flags)
    with fake.serving() as url:
        client = HttpClient(url, timeout_s=10)
        adapter = VllmAdapter(client, Settings(limits=limits))
        adapter.identify()
        scrape = adapter.scrape(0)
        client.close()
    assert scrape is not None
    assert scrape.limits.get("async_scheduling", told_by_flags) is ahead


def test_flags_may_stand_in_a_file_and_the_command_line_wins() -> None:
    text = "model: org/from-file\nport: 9000\ntensor_parallel_size: 4 # all\nnested:\n  port: 1\n"
    text += "list: [a]\n- x\n"
    got = told("--config", "c.yaml", "--port", "9100", config=text)
    assert (got.model, got.port, got.parallelism.tensor) == ("org/from-file", 9100, 4)
    assert told("m", "--config", "c.yaml", config=None).model == "m"


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["m", "--headless"], "no_api_process"),
        (["m", "--node-rank", "1"], "no_api_process"),
        (["m", "--uds", "/run/vllm.sock"], "no_tcp_port"),
        (["m", "--disable-log-stats"], "stats_disabled"),
    ],
)
def test_a_server_that_cannot_be_asked_says_why(words: list[str], kind: str) -> None:
    blind = told(*words).blind
    assert blind is not None
    assert blind.kind == kind
    assert blind.remedy


def test_an_offline_batch_has_no_endpoint() -> None:
    got = settings(["python", "-m", "vllm.entrypoints.openai.run_batch", "-i", "x"], lambda _: None)
    assert got.blind is not None


def test_overrides_of_the_model_are_remarked() -> None:
    assert [p.kind for p in told("m", "--hf-overrides", "{}").problems] == ["model_overridden"]


@pytest.mark.parametrize(
    ("config", "role"),
    [
        ('{"kv_role":"kv_producer"}', "prefill"),
        ('{"kv_role":"kv_consumer"}', "decode"),
        ('{"kv_role":"kv_both"}', "unified"),
        ("[", "unified"),
        ("[]", "unified"),
    ],
)
def test_the_role_in_a_disaggregated_pair(config: str, role: str) -> None:
    assert told("m", "--kv-transfer-config", config).role == role


def asked(fake: FakeVllm) -> list[set[str]]:
    """The names of each filtered request, "*" for a whole page."""
    seen = []
    for target in fake.requests:
        if target.startswith("/metrics"):
            _, _, query = target.partition("?")
            seen.append(set(query.replace("name[]=", "").split("&")) if query else {"*"})
    return seen


def test_a_few_names_each_second_and_the_others_every_ten() -> None:
    fake = FakeVllm(page("4"))
    with fake.serving() as url:
        client = HttpClient(url, timeout_s=10)
        adapter = VllmAdapter(client, Settings(front_ends=1))
        scrapes = [adapter.scrape(second * SECOND) for second in range(12)]
        client.close()
    names = asked(fake)
    assert [bool(set(SLOW) & seen) for seen in names] == [True, *[False] * 9, True, False]
    assert all(set(FAST) <= seen for seen in names)
    assert all(target.startswith("/metrics/?") for target in fake.requests)
    for scrape in scrapes:
        assert scrape is not None
        assert scrape.counters is not None
        assert scrape.problems == ()
        assert scrape.steps_reliable
        assert scrape.counters[0].generated_tokens == 12624
    assert scrapes[0] is not None
    assert scrapes[0].limits["kv_capacity_tokens"] == 2097152
    first, second = scrapes[0].counters, scrapes[1].counters if scrapes[1] else None
    assert first is not None
    assert second is not None
    assert first[0].prefix_query_tokens == 19504
    # Not asked for is not known: neither 0 nor the value of before.
    assert second[0].inter_token_latency_s is None
    assert second[0].prefix_query_tokens is None


def test_who_asks_often_is_told_where_in_a_window_decodes_ended() -> None:
    fake = FakeVllm(page("4"))
    with fake.serving() as url:
        client = HttpClient(url, timeout_s=10)
        adapter = VllmAdapter(client, Settings(front_ends=1))
        scrapes = [adapter.scrape(tenth * SECOND // 10) for tenth in (0, 1, 2, 12)]
        client.close()
    assert [set(QUICK) <= seen for seen in asked(fake)] == [False, True, True, False]
    told = [scrape.counters[0].inter_token_latency_s for scrape in scrapes if scrape and scrape.counters]
    assert told == [None, pytest.approx(157.54173866), pytest.approx(157.54173866), None]


@pytest.mark.parametrize("name", ["7", "8"])
def test_an_empty_filtered_page_leads_to_whole_pages_every_ten_seconds(name: str) -> None:
    fake = FakeVllm(page(name), filters=False)
    with fake.serving() as url:
        client = HttpClient(url, timeout_s=10)
        adapter = VllmAdapter(client, Settings(front_ends=2))
        scrapes = [adapter.scrape(second * SECOND) for second in range(21)]
        client.close()
    assert asked(fake)[1:] == [{"*"}] * 3
    assert [at for at, scrape in enumerate(scrapes) if scrape is not None] == [0, 10, 20]
    for scrape in filter(None, scrapes):
        assert scrape.counters
        assert [problem.kind for problem in scrape.problems] == ["filter_refused"]
        assert not scrape.steps_reliable


def test_a_server_that_ignores_the_filter_is_asked_for_whole_pages() -> None:
    class Ignores(FakeVllm):
        def answer(self, target: str) -> tuple[int, str]:
            return super().answer(target.partition("/?")[0])

    fake = Ignores(page("4"))
    with fake.serving() as url:
        client = HttpClient(url, timeout_s=10)
        adapter = VllmAdapter(client, Settings(front_ends=1))
        scrapes = [adapter.scrape(second * SECOND) for second in range(11)]
        client.close()
    assert [at for at, scrape in enumerate(scrapes) if scrape is not None] == [0, 10]
    # The page that came unasked was used: no second one was fetched for it.
    assert len(fake.requests) == 2
    assert scrapes[0] is not None
    assert [problem.kind for problem in scrapes[0].problems] == ["filter_refused"]
    assert scrapes[0].counters is not None
    assert scrapes[0].counters[0].prefix_query_tokens == 19504


def test_a_server_without_the_filtered_route_is_asked_for_whole_pages() -> None:
    class Lacks(FakeVllm):
        def answer(self, target: str) -> tuple[int, str]:
            return (404, "no") if target.startswith("/metrics/") else super().answer(target)

    with (fake := Lacks(page("4"))).serving() as url:
        client = HttpClient(url, timeout_s=10)
        scrape = VllmAdapter(client, Settings(front_ends=1)).scrape(0)
        client.close()
    assert scrape is not None
    assert scrape.counters is not None
    assert asked(fake)[-1] == {"*"}


def test_an_endpoint_of_unknown_front_ends_counts_steps_reliably_only_where_the_filter_works() -> None:
    for filters in (True, False):
        with FakeVllm(page("8"), filters=filters).serving() as url:
            client = HttpClient(url, timeout_s=10)
            scrape = VllmAdapter(client, Settings()).scrape(0)
            client.close()
        assert scrape is not None
        assert scrape.steps_reliable == filters


def test_a_page_without_vllm_is_not_recognised() -> None:
    with FakeVllm("python_info 1.0\n").serving() as url:
        client = HttpClient(url, timeout_s=10)
        scrape = VllmAdapter(client, Settings()).scrape(0)
        client.close()
    assert scrape is not None
    assert scrape.counters is None
    assert not scrape.recognised


def test_a_million_series_cost_an_error() -> None:
    flood = "".join(f'vllm:num_requests_running{{engine="{i}"}} 1\n' for i in range(6000))
    with FakeVllm(flood).serving() as url:
        client = HttpClient(url, timeout_s=10)
        with pytest.raises(HttpError) as caught:
            VllmAdapter(client, Settings()).scrape(0)
        client.close()
    assert caught.value.kind == "too_large"


def test_version_and_model_are_asked_for() -> None:
    with FakeVllm(page("0"), served="tiny", root="org/model").serving() as url:
        client = HttpClient(url, timeout_s=10)
        identity = VllmAdapter(client, Settings()).identify()
        client.close()
    assert (identity.version, identity.served_model, identity.model) == ("0.32.0", "tiny", "org/model")
    assert identity.problems == ()


def test_a_server_with_a_key_is_read_all_the_same() -> None:
    with FakeVllm(page("0"), models_status=401).serving() as url:
        client = HttpClient(url, timeout_s=10)
        adapter = VllmAdapter(client, Settings())
        identity, scrape = adapter.identify(), adapter.scrape(0)
        client.close()
    assert identity.model is None
    assert [problem.kind for problem in identity.problems] == ["auth_required"]
    assert scrape is not None
    assert scrape.counters is not None


@pytest.mark.parametrize(
    "models",
    ["[" * 100_000, '{"data":{}}', '{"data":[3]}', "[]", "null", '{"data":[{"id":"\\ud800\\u001b[31m"}]}'],
)
def test_nonsense_in_place_of_the_models_is_no_model(models: str) -> None:
    fake = FakeVllm(page("0"), version="1" * 5000)
    fake.models = models
    with fake.serving() as url:
        client = HttpClient(url, timeout_s=10)
        identity = VllmAdapter(client, Settings()).identify()
        client.close()
    assert identity.model is None
    assert identity.served_model in (None, "[31m")
    assert len(identity.version or "") == 400
