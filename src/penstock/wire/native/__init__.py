"""The native protocol: pipelined, length-prefixed msgpack. ``docs/native-protocol.md`` draws it.

``frames`` cuts bytes into frames, ``wire`` has a type for every frame that either side sends,
``failures`` carries errors across. Nothing here knows of sockets, brokers or time.
"""
