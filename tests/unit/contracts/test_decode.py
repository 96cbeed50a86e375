"""Bytes that are not a record of their topic fail to decode with one type of error."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgemq_contracts import topics

NO_UTF_8 = b"\x81\xaarequest_id\xa4\xff\xff\xff\xff"
TOO_DEEP = b"\x81\xa1a" + b"\x91" * 100_000
CUT_SHORT = b"\x82\xa1a"


@pytest.mark.parametrize("value", [NO_UTF_8, TOO_DEEP, CUT_SHORT, b"", b"\xc1"])
@pytest.mark.parametrize("topic", topics.ALL, ids=lambda topic: topic.name)
def test_bad_bytes_are_a_validation_error_on_every_topic(topic: topics.Topic, value: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        topics.decode(topic, value)


def test_the_error_keeps_its_cause_and_names_the_record() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"no FinishedCompletion: .*utf-8") as caught:
        topics.decode(topics.FINISHED_COMPLETIONS, NO_UTF_8)
    assert isinstance(caught.value.__cause__, UnicodeDecodeError)


@given(value=st.binary(max_size=200), topic=st.sampled_from(topics.ALL))
def test_any_bytes_are_a_record_or_a_validation_error(value: bytes, topic: topics.Topic) -> None:
    try:
        record = topics.decode(topic, value)
    except msgspec.ValidationError:
        return
    assert isinstance(record, topic.record)
