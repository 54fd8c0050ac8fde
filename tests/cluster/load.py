"""Runs inside the client pod: sends chat requests, streams the answers, prints one JSON line for each.

Standard input: one line with the plan (`client.Load`); when it is closed, no further request is begun.
"""

import asyncio
import itertools
import json
import sys
import threading
import time

import aiohttp


async def send(session, plan, index, body):
    """Sends one request; says how far its answer came."""
    answer = {"index": index, "status": 0, "began": False, "whole": False, "text": "", "error": ""}
    start = time.monotonic()
    headers = {"Authorization": f"Bearer {plan['api_key']}"} if plan["api_key"] else {}
    try:
        async with session.post(plan["url"] + "/chat/completions", json=body, headers=headers) as response:
            answer["status"] = response.status
            if response.status != 200:
                answer["error"] = (await response.text())[:500]
            else:
                await read(response, answer)
    except (TimeoutError, aiohttp.ClientError, OSError) as e:
        answer["error"] = repr(e)
    answer["seconds"] = time.monotonic() - start
    print(json.dumps(answer), flush=True)


async def read(response, answer):
    async for line in response.content:
        answer["began"] = True
        data = line.decode().strip().removeprefix("data:").strip()
        if data == "[DONE]":
            answer["whole"] = not answer["error"]
        elif data.startswith("{"):
            event = json.loads(data)
            if "error" in event:
                answer["error"] = json.dumps(event["error"])
            for choice in event.get("choices", ()):
                answer["text"] += choice["delta"].get("content") or ""
            details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
            answer["cached_tokens"] = details.get("cached_tokens") or 0


async def main(plan):
    stopped = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stopped.set()), daemon=True).start()
    bodies = itertools.cycle(plan["bodies"]) if plan["repeat"] else iter(plan["bodies"])
    numbered = enumerate(bodies)
    timeout = aiohttp.ClientTimeout(total=170)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def worker():
            for index, body in numbered:
                if stopped.is_set():
                    return
                await send(session, plan, index, body)

        await asyncio.gather(*(worker() for _ in range(plan["concurrency"])))


asyncio.run(main(json.loads(sys.stdin.readline())))
