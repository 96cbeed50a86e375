"""Reads a request that offers another protocol as if it did not.

A server may pass over such an offer (RFC 9110, section 7.8), and Java's HTTP client makes one with
its first request on every connection without TLS. httptools' parser leaves a request at the end of
its headers then, as if its body were the first bytes of the other protocol.
"""

from array import array

from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class RequestParser(HttpRequestParser):
    """The parser of one connection; a request with an offer is read twice, then without it.

    The first time its connection is to do nothing at the end of the headers and of the message:
    `has_offer`. A request for a tunnel is left as it is, and has no path to be served at.
    """

    def __init__(self, connection: HttpToolsProtocol) -> None:
        super().__init__(connection)
        self._connection = connection
        # As uvicorn has it: what follows a request that ends its connection is no error.
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    def has_offer(self) -> bool:
        """Whether the request that is read offers another protocol."""
        return bool(self.should_upgrade()) and self.get_method() != b"CONNECT"

    def feed_data(self, data: "bytes | bytearray | memoryview[int] | array[int]") -> None:
        """Read what has come; after an offer another parser takes the place of this one.

        Raises:
            HttpParserError: it is no HTTP.
            HttpParserUpgrade: it asks for a tunnel.
        """
        parser = self
        while True:
            try:
                HttpRequestParser.feed_data(parser, data)
            except HttpParserUpgrade as error:
                if not parser.has_offer():
                    raise
                data = parser._head() + bytes(data)[error.args[0] :]
                parser = self._connection.parser = RequestParser(self._connection)
            else:
                return

    def _head(self) -> bytes:
        """The line and the headers of the request, without the offer."""
        connection, version = self._connection, self.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.get_method(), connection.url, version)]
        lines += [b"%s: %s" % each for each in connection.headers if each[0] != b"upgrade"]
        return b"\r\n".join((*lines, b"", b""))
