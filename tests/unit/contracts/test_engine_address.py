"""Two names of one engine have one address."""

import pytest

from forgemq_contracts.engine_address import engine_address


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:30000", "http://127.0.0.1:30000"),
        ("http://localhost:30000/", "http://127.0.0.1:30000"),
        ("HTTP://LocalHost:30000", "http://127.0.0.1:30000"),
        ("http://[::1]:30000", "http://127.0.0.1:30000"),
        ("http://engine", "http://engine:80"),
        ("https://engine", "https://engine:443"),
        ("http://[fd00::7]:1", "http://[fd00::7]:1"),
        ("http://proxy/engine-1/", "http://proxy:80/engine-1"),
    ],
)
def test_an_address_has_one_form_by_whichever_name_it_comes(url: str, address: str) -> None:
    assert engine_address(url) == address


@pytest.mark.parametrize("url", ["", "e:1", "ftp://e", "http://", "http://[::1", "http://e:70000"])
def test_what_names_no_server_has_no_address(url: str) -> None:
    assert engine_address(url) is None
