"""The live aggregate: a Faust stream over the run's topics, applied to one `RunView`.

The aggregate is derived and rebuilt at every start: each start is a consumer group of its own that
reads from the first record. Faust reads uncommitted, so a record of an aborted transaction may
show for a moment; nothing depends on what is shown here.
"""

import ssl
from collections.abc import Callable, Mapping
from pathlib import Path

import faust
import msgspec

from forgemq_bus.blobs import BlobStore
from forgemq_bus.kafka import KafkaConnection
from forgemq_bus.log import Record
from forgemq_bus.names import broker_topic, contract_topic
from forgemq_bus.payloads import fetched
from forgemq_run_view.reading import message_of
from forgemq_run_view.view import TOPICS, RunView

Bad = Callable[[str], None]
FETCH_BYTES_MAX = 8 * 2**20


def stream_app(
    connection: KafkaConnection,
    *,
    run: str,
    start_id: str,
    view: RunView,
    blobs: BlobStore,
    datadir: Path,
    on_bad: Bad,
) -> faust.App:
    """A Faust app whose one agent applies every record of the run to the view.

    Args:
        connection: The broker, with its security.
        run: Id of the run.
        start_id: Different for every start of the console.
        view: The aggregate.
        blobs: Where large values lie.
        datadir: Folder that Faust makes for tables; there are none, so it may be a temporary one.
        on_bad: Told about a record that does not decode, in one line; it is skipped.
    """
    app = faust.App(
        f"{run}.console-{start_id}",
        broker=";".join(f"kafka://{each.strip()}" for each in connection.bootstrap.split(",")),
        broker_credentials=_credentials(connection),
        store="memory://",
        datadir=str(datadir),
        autodiscover=False,
        web_enabled=False,
        topic_allow_declare=False,
        topic_disable_leader=True,
        consumer_auto_offset_reset="earliest",
        consumer_max_fetch_size=FETCH_BYTES_MAX,
        stream_wait_empty=False,
        key_serializer="raw",
        value_serializer="raw",
    )
    source = app.topic(
        *(broker_topic(topic.name, run=run) for topic in TOPICS), key_type=bytes, value_type=bytes
    )

    async def apply(stream: faust.Stream) -> None:
        async for event in stream.events():
            message = event.message
            record = Record(
                topic=contract_topic(message.topic, run=run),
                partition=message.partition,
                offset=message.offset,
                timestamp_ms=int(message.timestamp * 1000),
                key=message.key or b"",
                value=message.value or b"",
                headers=_headers(message.headers),
            )
            try:
                view.apply(message_of((await fetched([record], blobs=blobs))[0]))
            except msgspec.MsgspecError as error:
                on_bad(f"{record.topic}/{record.partition}@{record.offset}: {error}")

    app.agent(source, name="run-view")(apply)
    return app


def _headers(headers: object) -> tuple[tuple[str, bytes], ...]:
    # Faust hands headers on as a mapping or as pairs, by driver version.
    pairs = headers.items() if isinstance(headers, Mapping) else headers or ()
    return tuple((str(name), bytes(value)) for name, value in pairs)  # type: ignore[attr-defined]


def _credentials(
    connection: KafkaConnection,
) -> faust.SASLCredentials | faust.SSLCredentials | None:
    context = (
        ssl.create_default_context(cafile=connection.tls_ca_file or None)
        if connection.security_protocol.endswith("SSL")
        else None
    )
    if connection.security_protocol.startswith("SASL"):
        return faust.SASLCredentials(
            mechanism=connection.sasl_mechanism,
            username=connection.sasl_username,
            password=connection.sasl_password,
            ssl_context=context,
        )
    return faust.SSLCredentials(context=context) if context is not None else None
