"""A parent that starts one fake engine, prints its process id and waits to be killed."""

import asyncio
import sys

from branchline.base.config import EngineConfig
from branchline.engine.launch import Child
from branchline.wire.child import EngineSettings
from branchline.wire.zmq import PrivateDirectory


async def main(engine_script, model):
    with PrivateDirectory() as directory:
        settings = EngineSettings(
            config=EngineConfig(model=model), addresses=directory.addresses(), cache_dir=directory.path
        )
        child = Child("engine", [engine_script], settings)
        await child.wait_ready(20)
        print(child.pid, directory.path, flush=True)
        await child.ended()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
