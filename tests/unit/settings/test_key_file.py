"""Files of keys, and which addresses keys that everybody knows may guard."""

from pathlib import Path

import pytest

from forgemq_settings.environment import SettingsError
from forgemq_settings.key_file import PUBLISHED_KEYS, KeyFile, check_not_published, is_loopback

ONE, TWO = "the-first-key-of-it", "the-second-key-of-it"


def test_a_file_gives_its_keys_in_their_order_and_says_when_it_has_others(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# newest first\n{TWO}\n\n  {ONE}  \n")
    file, reasons = KeyFile(str(path), variable="V"), []
    assert file.read() == (TWO, ONE)
    assert file.renewed(kept=reasons.append) is None
    path.write_text(f"{TWO}\n")
    assert file.renewed(kept=reasons.append) == (TWO,)
    path.write_text("short")
    assert (file.renewed(kept=reasons.append), len(reasons)) == (None, 1)
    assert reasons == ["V: key 1 must have at least 16 characters"]
    assert (file.renewed(kept=reasons.append), len(reasons)) == (None, 1), "said once"


def test_a_file_that_is_replaced_by_another_of_the_same_size_has_changed(tmp_path: Path) -> None:
    """As a mounted secret is: the link leads to another file."""
    path = tmp_path / "keys"
    path.write_text(ONE)
    file = KeyFile(str(path), variable="V")
    file.read()
    other = tmp_path / "other"
    other.write_text(ONE[::-1])
    other.replace(path)
    assert file.renewed(kept=pytest.fail) == (ONE[::-1],)


def test_a_key_that_everybody_knows_is_refused_in_a_file_as_in_a_setting(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("change-me-before-use")
    assert KeyFile(str(path), variable="V", hosts=["127.0.0.1"]).read() == ("change-me-before-use",)
    with pytest.raises(SettingsError, match=r"^V: a key is one that the documents show"):
        KeyFile(str(path), variable="V", hosts=["127.0.0.1", "0.0.0.0"]).read()


def test_a_short_key_is_named_by_its_number_and_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{ONE}\nshort-secret\n")
    with pytest.raises(SettingsError, match=r"^V: key 2 must have at least 16 char") as refused:
        KeyFile(str(path), variable="V").read()
    assert "short-secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("127.0.0.1", True),
        ("127.3.2.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.0.2", False),
        ("gateway", False),
        ("127.0.0.1.example.org", False),
    ],
)
def test_loopback_is_what_no_other_machine_reaches(host: str, said: bool) -> None:
    assert is_loopback(host) == said
    for key in PUBLISHED_KEYS:
        if said:
            check_not_published((ONE, key), hosts=[host], variable="V")
            continue
        with pytest.raises(SettingsError, match=r"^V: a key is one that the documents show"):
            check_not_published((ONE, key), hosts=[host], variable="V")
