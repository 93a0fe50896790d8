"""The SQS wire protocol, pure: no sockets, brokers or clocks.

``jsonwire`` and ``querywire`` turn bytes into the ``requests`` of the 23 operations, and answers
into bytes; ``messages`` and ``queues`` map them to Penstock's nouns; ``faults`` are SQS's errors;
``signature`` checks signatures.
"""
