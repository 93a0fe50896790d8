"""Keys and records, byte for byte. Bytes in, bytes out: no I/O, no clock.

==================  ==========================================================================
module              owns
==================  ==========================================================================
``encodings``       the building blocks: TerminatedBytes, Utf8, Array counts, var_u64, SeqBlock
``opendata``        ids and keys of the OpenData-Queue records
``records``         their values: active buckets, done, failed, attempts, specs
``summaries``       values of the summaries of active buckets
``log``             keys and values of the OpenData-Log, which is the metadata log
``stored``          items and leases: two Cap'n Proto records, hand-made for speed
``queueber.capnp``  the schema of those two: Queueber's records, with our fields added
``metadata``        the opaque metadata bytes of a message
==================  ==========================================================================

Every decoder raises :class:`~penstock.errors.CorruptRecord` and nothing else for bytes that it
can't read; a record that it accepts, its encoder writes back unchanged.
"""
