"""placeholder"""


async def prefetch(program, prepared, fanout):
    return 0
