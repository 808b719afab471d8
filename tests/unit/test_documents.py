"""What the documents say is there is there, and what is there is said."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from jetcapture_py.archive import layout
from jetcapture_py.archive.watermark import ConsumerWatermark
from jetcapture_py.config import model
from jetcapture_py.config.captures import AccountConfig
from jetcapture_py.errors import ConfigError
from jetcapture_py.manage.cases import load_cases
from jetcapture_py.monitoring.facts import SEALED_BY
from jetcapture_py.verify.findings import Kind, Severity
from jetcapture_py.verify.repair import Repair
from spark_jobs.datasource.options import ReadOptions, WriteOptions
from spark_jobs.publishing import login
from tests.support.documents import PAGES, REPOSITORY, Block, blocks, every, first_cells, generator, read, section
from tests.support.running import settings
from tests.unit.archive.test_writer import BLOCK, ENCODER, batch, metadata, write
from tests.unit.verify.test_report import COMPLETE, finding, hole, with_holes

LANGUAGES = {"sh", "console", "yaml", "sql", "python", "json"}
"""Languages of blocks that a test runs or checks: see tests/acceptance/test_documents.py."""
ENVIRONMENT = {"PWD": "/srv"}
WATERMARK = {"created": "stream_created", "sample": "stream_message"}
"""Attributes that have another name in the file."""
PACKAGES = ("jetcapture_py", "spark_jobs")


def test_every_block_is_in_a_language_that_is_checked() -> None:
    assert not [block for page in PAGES for block in blocks(page) if block.language not in LANGUAGES]


def refusal(block: Block, directory: Path) -> str | None:
    """Why a configuration or cases of a page are refused or warned of; None if they are not."""
    given = yaml.safe_load(block.text)
    try:
        if isinstance(given, list):
            (directory / "cases.yaml").write_text(block.text)
            return None if load_cases(directory / "cases.yaml") else "no cases"
        one = given.get("config", given)  # of the values of a chart
        if not {"source", "store"} <= one.keys():
            one = settings("nats://127.0.0.1:4222", "/archive", **one)
        account = AccountConfig.of(one, ENVIRONMENT, model.parse)
        found = model.loads(yaml.safe_dump(one), ENVIRONMENT) if account is None else account.sample
        return "; ".join(map(str, found.warnings())) or None
    except ConfigError as error:
        return str(error)


def test_every_configuration_is_accepted(tmp_path: Path) -> None:
    given = every("yaml")
    assert len(given) > 20
    assert not {str(block): reason for block in given if (reason := refusal(block, tmp_path))}


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as Git hosts make them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", read(page), flags=re.DOTALL | re.MULTILINE), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def leads_somewhere(page: str, target: str) -> bool:
    path, _, anchor = target.partition("#")
    file = (REPOSITORY / page).parent / path if path else REPOSITORY / page
    return file.exists() and (not anchor or anchor in anchors(file.resolve().relative_to(REPOSITORY).as_posix()))


def test_every_link_leads_somewhere() -> None:
    prose = {page: re.sub(r"^```.*?^```$", "", read(page), flags=re.DOTALL | re.MULTILINE) for page in PAGES}
    targets = [(page, target) for page in PAGES for target in re.findall(r"\]\(([^)\s]+)\)", prose[page])]
    links = [(page, target) for page, target in targets if "://" not in target]
    assert len(links) > 100
    assert not [link for link in links if not leads_somewhere(*link)]


def test_every_page_is_linked_from_the_readme_or_the_list_of_decisions() -> None:
    linked = set(re.findall(r"\]\(([\w/.-]+\.md)\)", read("README.md")))
    linked |= {f"docs/decisions/{name}" for name in re.findall(r"\]\(([\w-]+\.md)\)", read("docs/decisions/README.md"))}
    assert set(PAGES) - {"README.md"} == linked


def test_the_tables_are_those_of_the_model_the_tests_and_the_chart() -> None:
    generate = generator()
    for path, make in (
        *((generate.PAGE, generate.page), (generate.COMPATIBILITY, generate.compatibility)),
        (generate.KUBERNETES, generate.values),
    ):
        assert make(path.read_text()) == path.read_text(), "run `make docs`"
    described = first_cells(section("docs/configuration.md", "All settings"))
    assert {"nats.tls.ca", "source.max_ack_pending", "store.concurrency", "key", "drain_timeout"} <= described
    described = first_cells(section("docs/kubernetes.md", "Values"))
    assert {"config", "autoscaling.lagSeconds", "jobs.NAME.schedule"} <= described


def test_the_supported_versions_are_those_that_are_tested() -> None:
    supported = section("docs/compatibility.md", "Support")
    servers = re.search(r"for version in ([\d. ]+); do", (REPOSITORY / ".ci" / "nightly").read_text())
    assert servers is not None
    assert all(version in supported for version in servers[1].split())
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    pythons = [text.rpartition(" ")[2] for text in project["classifiers"] if re.search(r"Python :: 3\.\d+$", text)]
    assert f"| {pythons[0]} to {pythons[-1]} |" in supported
    spark = next(text for text in project["optional-dependencies"]["spark"] if text.startswith("pyspark"))
    assert f"PySpark {spark.removeprefix('pyspark>=').partition(',')[0]} " in supported


def events(path: Path) -> Iterator[str]:
    """The names of events that a module logs, and of warnings that it hands on to be logged."""
    for node in ast.walk(ast.parse(path.read_text())):
        arguments: list[ast.expr] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "event":
            arguments = node.args[2:3]
        elif isinstance(node, ast.Tuple) and len(node.elts) == 2 and isinstance(node.elts[1], ast.Dict):
            arguments = node.elts[:1]
        for argument in arguments:
            if isinstance(argument, ast.Constant) and re.fullmatch(r"[a-z_]+\.[a-z_]+", str(argument.value)):
                yield str(argument.value)


def test_every_log_event_is_described_and_no_other() -> None:
    logged = {name for path in (REPOSITORY / "jetcapture_py").rglob("*.py") for name in events(path)}
    assert {"blocks.stored", "watermark.filters"} <= logged
    logged |= set(re.findall(r'"((?:library|python)\.\w+)"', (REPOSITORY / "jetcapture_py" / "log.py").read_text()))
    assert first_cells(section("docs/metrics.md", "Log events")) == logged


def test_every_metric_is_described_and_no_other() -> None:
    sources = (REPOSITORY / "jetcapture_py" / "monitoring" / name for name in ("facts.py", "health.py"))
    found = set()
    for how, name in re.findall(r'\b(counter|gauge|histogram)\(\s*"(\w+)"', "".join(map(Path.read_text, sources))):
        found.add(f"jetcapture_{name}{'_total' if how == 'counter' else ''}")
    assert len(found) > 30
    assert first_cells(section("docs/metrics.md", "Metrics")) == found


def test_every_alert_has_a_runbook_and_no_other() -> None:
    groups = yaml.safe_load((REPOSITORY / "examples" / "monitoring" / "alerts.yaml").read_text())["groups"]
    severities = {rule["alert"]: rule["labels"]["severity"] for group in groups for rule in group["rules"]}
    text = section("docs/monitoring.md", "Runbooks")
    form = r"^### (\w+)\n\n\*(\w+)\.\* .+?- \*\*See:\*\* .+?- \*\*Do:\*\* "
    runbooks = re.findall(form, text, re.DOTALL | re.MULTILINE)
    assert dict(runbooks) == severities


def test_every_message_that_troubleshooting_explains_is_one_of_the_code() -> None:
    texts: set[str] = set()
    for package in PACKAGES:
        for path in (REPOSITORY / package).rglob("*.py"):
            nodes = ast.walk(ast.parse(path.read_text()))
            texts |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    known = first_cells(section("docs/metrics.md", "Log events")) | first_cells(section("docs/metrics.md", "Metrics"))
    rows = [line for line in read("docs/troubleshooting.md").splitlines() if line.startswith("| ")]
    unknown = []
    for message in re.findall(r"`([^`]+)`", "\n".join(row.split(" | ")[0] for row in rows)):
        if re.fullmatch(r"[a-z_]+\.[a-z_]+|jetcapture_\w+", message):
            unknown += [message] if message not in known else []
        elif " " in message:
            parts = [part.strip(" ;,:") for part in message.split("…")]
            unknown += [part for part in parts if not any(part in text for text in texts)]
    assert unknown == []


def test_every_option_of_the_data_source_is_described() -> None:
    table = section("docs/spark.md", "The `nats` data source")
    words = set(re.findall(r"`(\w+)`", table))
    for options in (ReadOptions, WriteOptions):
        names = {field.alias or name for name, field in options.model_fields.items()} - {"nats"}
        assert names <= words
    assert {name for name in login.OPTIONS if not name.endswith("_file")} <= words


def test_every_entry_of_a_footer_and_column_of_the_envelope_is_described() -> None:
    text = read("docs/archive-format.md")
    footer = section("docs/archive-format.md", "Footer")
    encoder = replace(ENCODER, key_rule="{subject}")
    for block in (BLOCK, replace(BLOCK, key=None, quarantine=True)):
        for entry in metadata(write(batch([(1, 2)]), block=block, encoder=encoder)):
            assert f"`jetcapture.{entry}`" in footer or f"`.{entry}`" in footer, entry
    for column in (*layout.ENVELOPE, layout.ROW, layout.STAGE, layout.ERROR, layout.RAW_HEADERS):
        assert f"`{column}`" in text
    written = section("docs/archive-format.md", "Watermark")
    for name in ConsumerWatermark.__struct_fields__:
        assert f"`{WATERMARK.get(name, name)}`" in written


def test_what_a_proof_says_in_the_documents_is_what_it_says() -> None:
    sample, repaired = blocks("docs/verify.md", "console")
    first, last = moment("11:20:00.000123"), moment("11:20:59.001234")
    problem = "it promises everything up to 12000, but sequence 4101 is not stored"
    wrong = finding(Kind.WATERMARK, Severity.WARNING, problem)
    report = with_holes(replace(hole(4101, 4200), first_time=first, last_time=last), more=(wrong,))
    report = replace(report, up_to=12_000, up_to_time=moment("12:00:00.123456"), objects=119, bytes=431_522)
    assert sample.text == f"$ jetcapture verify config.yaml\n{report.as_text()}\n"
    command, verdict, *lines = repaired.text.splitlines()
    assert (command, verdict.split(":")[0]) == ("$ jetcapture verify config.yaml --repair", "complete")
    paths = tuple(line.strip() for line in lines if line.startswith("  "))
    assert all(layout.parse_path(path) for path in paths)
    done = Repair(messages=100, stored=2, replaced=1, objects=paths)
    assert lines[-3:] == list(done.lines(COMPLETE))


def moment(clock: str) -> datetime:
    return datetime.fromisoformat(f"2026-05-01T{clock}Z")


def test_every_place_that_the_architecture_names_is_there() -> None:
    table = section("docs/architecture.md", "Life of a message")
    places = re.findall(r"\| `((?:jetcapture_py|spark_jobs)/[\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)", table)
    assert len(places) == len([line for line in table.splitlines() if line.startswith("| ")]) - 1
    for path, names in places:
        tree = ast.parse((REPOSITORY / path).read_text())
        for name in re.findall(r"`([\w.]+)`", names):
            scope: Any = tree
            for part in name.split("."):
                kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
                scope = next((n for n in scope.body if isinstance(n, kinds) and n.name == part), None)
                assert scope is not None, f"{path} has no {name}"


def test_every_package_is_in_the_architecture() -> None:
    text, picture = read("docs/architecture.md"), read("docs/images/house.svg")
    for package in PACKAGES:
        for path in (REPOSITORY / package).iterdir():
            if (path / "__init__.py").exists():
                assert f"`{package}.{path.name}`" in text or f"`.{path.name}`" in text, path
                assert re.search(rf"\b{path.name}\b", picture), path


def test_every_file_of_the_repository_that_a_page_names_is_there() -> None:
    form = r"`((?:jetcapture_py|spark_jobs|examples|tests|benchmarks|docs)/[\w./*-]+)`"
    named = [(page, path) for page in PAGES for path in re.findall(form, read(page))]
    assert len(named) > 50
    assert not [(page, path) for page, path in named if not list(REPOSITORY.glob(path.rstrip("/")))]


def test_the_reasons_for_sealing_are_those_there_are() -> None:
    row = next(line for line in read("docs/metrics.md").splitlines() if "jetcapture_blocks_sealed_total" in line)
    assert set(re.findall(r"`(\w+)`", row)) - {"jetcapture_blocks_sealed_total", "reason"} == set(SEALED_BY)
