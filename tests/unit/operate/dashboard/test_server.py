"""The page over real sockets, requested by strangers and by its user."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from simulated_training import Training

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from paceline.operate.dashboard.access import Access
from paceline.operate.dashboard.server import (
    AddressError,
    DashboardServer,
    ListenAddress,
    MissingDashError,
    check_installed,
    lines,
)

TOKEN = "0123456789abcdef0123456789abcdef"
HOST = "Host: localhost:8080"
BEARER = f"Authorization: Bearer {TOKEN}"


class Page:
    """The page of a simulated job, with methods that send raw requests to it."""

    def __init__(self, place: ListenAddress, **options: object) -> None:
        self.complaints: list[str] = []
        training = Training(2)
        training.run(3.0)
        self.listener = place.listen()
        self.name = self.listener.getsockname()
        acts = bool(options.pop("acts", False))
        access = Access(TOKEN, "job", acts=acts)
        self.serving = DashboardServer(self.listener, training.look, access, complain=self.complaints.append, **options)

    def connect(self) -> socket.socket:
        family = socket.AF_UNIX if isinstance(self.name, str) else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.settimeout(20)
        connection.connect(self.name)
        return connection

    def ask(self, first: str, *headers: str) -> tuple[int, dict[str, str], bytes]:
        """Returns the status, the headers in lower case and the body of the response."""
        with self.connect() as connection:
            connection.sendall("\r\n".join([f"{first} HTTP/1.1", *headers, "Connection: close", "", ""]).encode())
            data = b""
            while more := connection.recv(1 << 16):
                data += more
        head, _, body = data.partition(b"\r\n\r\n")
        status, *fields = head.decode().split("\r\n")
        return int(status.split()[1]), {k.lower(): v for k, _, v in (field.partition(": ") for field in fields)}, body

    def stream(self, *headers: str) -> Iterator[tuple[str, str, dict[str, object]]]:
        """Yields (id, event, data) from the event stream."""
        with self.connect() as connection:
            connection.sendall("\r\n".join(["GET /events HTTP/1.1", HOST, BEARER, *headers, "", ""]).encode())
            file = connection.makefile("rb")
            event: dict[str, str] = {}
            for line in file:
                key, _, value = line.decode().rstrip("\n").partition(": ")
                event[key] = value
                if key == "data":
                    yield event.get("id", ""), event["event"], json.loads(value)


@contextmanager
def served(place: ListenAddress | None = None, **options: object) -> Iterator[Page]:
    page = Page(place or ListenAddress(), **options)
    try:
        yield page
    finally:
        page.serving.close()
    assert page.complaints == []


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with served() as page:
        yield page


PATHS = ("/", "/events", "/picture.json", "/metrics", "/static/main.js", "/actions/stacks", "/nothing")


@pytest.mark.parametrize("path", PATHS)
def test_no_path_answers_without_the_token(page, path):
    status, headers, body = page.ask(f"GET {path}", HOST)
    assert (status, b"paceline run --dash" in body) == (401, True)
    assert "content-security-policy" in headers


@pytest.mark.parametrize("path", PATHS)
def test_no_path_answers_under_another_name(page, path):
    assert page.ask(f"GET {path}", "Host: rebound.example:8080", BEARER)[0] == 421


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"])
def test_no_path_can_be_written_to(page, method):
    for path in PATHS:
        status, headers, _ = page.ask(f"{method} {path}", HOST, BEARER, "Content-Length: 0")
        assert (status, headers["allow"]) == (405, "GET")


@pytest.mark.parametrize(
    "path",
    ["/static/../server.py", "/static/%2e%2e/server.py", "/static/..%2fserver.py", "/static//etc/passwd",
     "/../../etc/passwd", "/static/%2fetc%2fpasswd", "/static/..\\server.py", "/static/index.html%00.js"],
)  # fmt: skip
def test_nothing_outside_the_static_files_is_served(page, path):
    status, _, body = page.ask(f"GET {path}", HOST, BEARER)
    assert status in (400, 404)
    assert b"import" not in body and b"root:" not in body


def test_two_hosts_in_one_request_are_refused(page):
    assert page.ask("GET /", HOST, "Host: rebound.example", BEARER)[0] in (400, 421)


def test_the_token_in_the_address_is_exchanged_for_a_cookie(page):
    status, headers, _ = page.ask(f"GET /?token={TOKEN}", HOST)
    assert (status, headers["location"]) == (303, "./")
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert page.ask("GET /", HOST, f"Cookie: {cookie.partition(';')[0]}")[0] == 200
    assert page.ask("GET /?token=wrong", HOST)[0] == 401


def test_every_answer_carries_the_policy(page):
    for path in ("/", "/static/main.js", "/picture.json", "/nothing"):
        headers = page.ask(f"GET {path}", HOST, BEARER)[1]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in headers


def test_the_page_asks_for_nothing_from_elsewhere(page):
    body = page.ask("GET /", HOST, BEARER)[2].decode()
    asked = re.findall(r'(?:src|href)="([^"]*)"', body)
    assert asked and all(name.startswith("static/") for name in asked)
    for name in asked:
        assert page.ask(f"GET /{name}", HOST, BEARER)[0] == 200
    assert "style=" not in body and "onclick" not in body


def test_the_picture_and_the_metrics_are_for_scripts(page):
    picture = json.loads(page.ask("GET /picture.json", HOST, BEARER)[2])
    assert [row["rank"] for row in picture["ranks"]] == [0, 1]
    text = page.ask("GET /metrics", HOST, BEARER)[2].decode()
    assert 'paceline_rank_compute_seconds{job="digits-7f3a",rank="1",host="node0"} ' in text
    assert re.search(r"^paceline_step\{job=\"digits-7f3a\"\} \d+$", text, re.MULTILINE)


def test_a_viewer_gets_a_snapshot_and_then_changes(page):
    stream = page.stream()
    first = next(stream)
    assert first[1] == "snapshot" and "ranks" in first[2]
    second = next(stream)
    assert second[1] == "change"
    resumed = next(page.stream(f"Last-Event-ID: {first[0]}"))
    assert (resumed[0], resumed[1]) == (second[0], "change")
    assert next(page.stream("Last-Event-ID: other-1"))[1] == "snapshot"


def test_text_of_the_job_is_only_data(page):
    stream = next(page.stream())
    assert any("<b>" in line["text"] for line in stream[2]["log"]["items"])
    page_itself = page.ask("GET /", HOST, BEARER)[2]
    assert b"UserWarning" not in page_itself


def test_actions_are_refused_unless_they_are_allowed(page):
    action = ("POST /actions/stacks", HOST, BEARER, "X-Paceline-Action: stacks", "Content-Length: 0")
    assert page.ask(*action)[0] == 405
    with served(acts=True, actions={"stacks": lambda: "taken"}) as acting:
        status, _, body = acting.ask(*action)
        assert (status, json.loads(body)) == (200, {"report": "taken"})
        assert acting.ask("POST /actions/stacks", HOST, BEARER, "Content-Length: 0")[0] == 405
        assert acting.ask("POST /actions/kill", *action[1:])[0] == 404


def test_under_a_prefix_both_forms_of_paths_work():
    with served(prefix="/proxy/8080") as page:
        assert page.ask("GET /proxy/8080/static/main.js", HOST, BEARER)[0] == 200
        assert page.ask("GET /static/main.js", HOST, BEARER)[0] == 200
        assert page.ask("GET /proxy/80801/static/main.js", HOST, BEARER)[0] == 404
        _, headers, _ = page.ask(f"GET /proxy/8080?token={TOKEN}", HOST)
        assert headers["location"] == "8080/"
        assert "Path=/proxy/8080;" in headers["set-cookie"]


def test_a_unix_socket_is_for_its_user_only(tmp_path):
    path = tmp_path / "page"
    with served(ListenAddress(path=str(path))) as page:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert page.ask("GET /", HOST, BEARER)[0] == 200
        assert page.ask("GET /", HOST)[0] == 401
        with pytest.raises(AddressError, match="another process serves"):
            ListenAddress(path=str(path)).listen()
        assert any(f"ssh -L 8080:{path} " in line for line in lines(page.listener, TOKEN))
    assert not path.exists()


def test_the_page_listens_on_loopback_only(page):
    assert page.name[0] == "127.0.0.1"
    told = lines(page.listener, TOKEN, "/x")
    assert f"http://localhost:{page.name[1]}/x/?token={TOKEN}" in told[0]
    assert f"ssh -L {page.name[1]}:localhost:{page.name[1]} " in told[1]


def test_a_port_that_is_taken_is_named(page):
    with pytest.raises(AddressError, match=f"port {page.name[1]} of loopback"):
        ListenAddress(page.name[1]).listen()


def test_open_streams_end_with_the_page(capfd):
    with served() as page:
        stream = page.stream()
        first = next(stream)[1]
        page.serving.close()
        assert (first, list(stream)[-1][1]) == ("snapshot", "end")
    assert capfd.readouterr().err == ""


def test_a_request_that_fails_is_reported_in_one_line(capfd):
    def fail() -> str:
        raise RuntimeError("no stacks today")

    page = Page(ListenAddress(), acts=True, actions={"stacks": fail})
    try:
        assert (
            page.ask("POST /actions/stacks", HOST, BEARER, "X-Paceline-Action: stacks", "Content-Length: 0")[0] == 500
        )
    finally:
        page.serving.close()
    (complaint,) = page.complaints
    assert complaint.startswith("the page could not answer a request (RuntimeError: no stacks today, in ")
    assert complaint.endswith("; the job is not affected") and "\n" not in complaint
    assert capfd.readouterr().err == ""


def test_malformed_requests_of_strangers_are_not_reported():
    with served() as page:
        for _ in range(3):
            with page.connect() as connection:
                connection.sendall(f"GET / HTTP/1.1\r\n{HOST}\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n".encode())
                while connection.recv(1 << 16):
                    pass
        assert page.ask("GET /picture.json", HOST, BEARER)[0] == 200
    assert page.complaints == []


def test_requests_that_fail_do_not_fill_the_log():
    def fail() -> str:
        raise RuntimeError("no stacks today")

    page = Page(ListenAddress(), acts=True, actions={"stacks": fail})
    try:
        for _ in range(5):
            page.ask("POST /actions/stacks", HOST, BEARER, "X-Paceline-Action: stacks", "Content-Length: 0")
    finally:
        page.serving.close()
    assert len(page.complaints) == 3 and page.complaints[2].endswith("; further errors are not reported")


def test_a_page_that_fails_complains_once_and_is_gone():
    def fail() -> None:
        raise RuntimeError("no such job")

    complaints: list[str] = []
    serving = DashboardServer(ListenAddress().listen(), fail, Access(TOKEN), complain=complaints.append)
    serving._thread.join(20)
    serving.close()
    assert complaints == ["the page has failed and is closed; the job continues (RuntimeError: no such job)"]


def test_packages_that_are_missing_are_named_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(MissingDashError, match=r"--dash needs uvicorn, .* pip install 'paceline\[dash\]'"):
        check_installed()
