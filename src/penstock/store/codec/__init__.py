"""Keys and records, byte for byte. Bytes in, bytes out: no I/O, no clock.

==================  ==========================================================================
module              owns
==================  ==========================================================================
``opendata``        encodings, ids and keys of OpenData's Queue; the Log, which is the metadata log
``records``         values of the Queue: done, failed, attempts, specs; items and leases
``buckets``         values of the Queue: active buckets and their summaries
``queueber.capnp``  the schema of leases: Queueber's record, with our fields added
``metadata``        the opaque metadata bytes of a message
``claimed``         receipts; the messages of a claim as they travel to a client
==================  ==========================================================================

Every decoder raises :class:`~penstock.errors.CorruptRecord` and nothing else for bytes that it
can't read; a record that it accepts, its encoder writes back unchanged.
"""
