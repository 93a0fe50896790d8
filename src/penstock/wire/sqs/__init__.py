"""The SQS wire protocol, pure: requests, answers, faults, digests, signatures and the mapping.

::

    body ──jsonwire | querywire──▶ requests ──(server/sqs)──▶ answer ──jsonwire | querywire──▶ body
                                     │   ▲
             messages, queues: what SQS says ◀──▶ what Penstock keeps

``faults`` are SQS's errors with their codes in both protocols, ``digests`` its MD5s, ``signature``
its request signatures. Nothing here knows of sockets, brokers or clocks.
"""
