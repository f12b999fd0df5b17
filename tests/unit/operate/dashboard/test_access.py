"""Access control for the live page: each rule by itself, and the page that the rules protect."""

from __future__ import annotations

import pytest

from paceline.operate.dashboard.access import HEADERS, Access, AccessDecision, PageRequest, name_of, new_token

TOKEN = "0123456789abcdef0123456789abcdef"
ACCESS = Access(TOKEN, "job-7")
BEARER = {"host": "localhost:8080", "authorization": f"Bearer {TOKEN}"}


def decided(
    headers: dict[str, str], method: str = "GET", token: str | None = None, access: Access = ACCESS
) -> AccessDecision:
    return access.decide(PageRequest(method, "/", token, headers))


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:43121", "[::1]:8080"])
def test_loopback_names_are_known_at_any_port(host):
    assert decided({**BEARER, "host": host}) is AccessDecision.PASSES


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "evil.example:80@localhost",
     "localhost:x", "0.0.0.0", "[::2]", "localhost; localhost", "169.254.169.254", "localhost:80 ", "local\u0068ost/"],
)  # fmt: skip
def test_other_hosts_are_refused_even_with_the_token(host):
    assert decided({**BEARER, "host": host}) is AccessDecision.UNKNOWN_HOST


def test_hosts_of_proxies_are_known_if_they_are_listed():
    access = Access(TOKEN, hosts=frozenset({"hub.example.org"}))
    assert decided({**BEARER, "host": "hub.example.org:443"}, access=access) is AccessDecision.PASSES
    assert decided({**BEARER, "host": "other.example.org"}, access=access) is AccessDecision.UNKNOWN_HOST


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE", "CONNECT", "get", "X"]
)
def test_every_method_but_get_is_refused(method):
    assert decided(BEARER, method) is AccessDecision.WRONG_METHOD
    assert decided({**BEARER, "x-paceline-action": "stacks"}, method) is AccessDecision.WRONG_METHOD


def test_actions_need_the_flag_the_header_and_the_token():
    acting = Access(TOKEN, acts=True)
    action = {"x-paceline-action": "stacks"}
    assert decided({**BEARER, **action}, "POST", access=acting) is AccessDecision.PASSES
    assert decided(BEARER, "POST", access=acting) is AccessDecision.WRONG_METHOD
    assert decided({"host": "localhost", **action}, "POST", access=acting) is AccessDecision.NO_TOKEN
    assert decided({**BEARER, **action, "host": "evil.example"}, "POST", access=acting) is AccessDecision.UNKNOWN_HOST
    assert decided({**BEARER, **action}, "PUT", access=acting) is AccessDecision.WRONG_METHOD


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer"}, {"authorization": "Bearer " + TOKEN[:-1]}, {"authorization": f"Basic {TOKEN}"},
     {"cookie": f"paceline={TOKEN}"}, {"cookie": f"paceline-job-8={TOKEN}"}, {"cookie": "paceline-job-7="},
     {"cookie": f"x=paceline-job-7={TOKEN}"}, {"authorization": "Bearer \u00e9"}],
)  # fmt: skip
def test_without_the_token_nothing_is_shown(headers):
    assert decided({"host": "localhost", **headers}) is AccessDecision.NO_TOKEN


def test_the_cookie_of_this_page_lets_in():
    assert decided({"host": "localhost", "cookie": f"a=b; paceline-job-7={TOKEN}; c=d"}) is AccessDecision.PASSES


def test_a_token_in_the_address_becomes_a_cookie():
    assert decided({"host": "localhost"}, token=TOKEN) is AccessDecision.ENTERS
    assert decided({"host": "localhost"}, token="") is AccessDecision.NO_TOKEN
    assert decided(BEARER, token="wrong") is AccessDecision.NO_TOKEN
    assert decided({"host": "evil.example"}, token=TOKEN) is AccessDecision.UNKNOWN_HOST


def test_tokens_are_128_random_bits():
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(len(bytes.fromhex(token)) == 16 for token in tokens)


def test_names_of_cookies_hold_no_separators():
    assert name_of("a job; Path=/\r\nSet-Cookie: x=1") == "a-job--Path----Set-Cookie--x-1"


def test_the_policy_names_no_other_origin():
    policy = HEADERS["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "frame-ancestors 'none'" in policy
    assert "http" not in policy and "unsafe" not in policy and "*" not in policy
