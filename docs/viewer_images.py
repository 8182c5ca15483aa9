"""Takes the pictures of `viewer.md`: `python docs/viewer_images.py RUNS`, a folder with the run `quickstart`.

It needs Chromium and strop's extra `dev`.
"""

from __future__ import annotations

import io
import os
import shutil
import socket
import sys
import threading
from pathlib import Path

import uvicorn
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from strop.serve.viewer.app import build

IMAGES = Path(__file__).parent / "images"
SHOWN = "() => document.getElementById('page').dataset.shown === location.hash"


def taken(page: Page, where: str, *, token: int | None = None, height: int | None = None) -> Image.Image:
    page.goto(where)
    page.wait_for_function(SHOWN)
    if token is not None:
        page.locator(".tok.own").nth(token).hover()
    page.wait_for_timeout(500)
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    return image if height is None else image.crop((0, 0, image.width, height))


def kept(name: str, image: Image.Image) -> None:
    """Few colours: these are pages, not photographs."""
    image.quantize(96, dither=Image.Dither.NONE).save(IMAGES / f"{name}.png", optimize=True)


def main() -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)
    server = uvicorn.Server(uvicorn.Config(build(sys.argv[1:2]), log_level="warning", lifespan="off"))
    threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True).start()
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    IMAGES.mkdir(exist_ok=True)
    episode = "#/episode?run=quickstart&step=12&row=9&tree=group"
    with sync_playwright() as playwright:
        sandbox = [] if os.getuid() else ["--no-sandbox"]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=sandbox)
        wide = browser.new_page(base_url=address, viewport={"width": 1280, "height": 820}, color_scheme="light")
        kept("viewer-run", taken(wide, "#/run?run=quickstart", height=720))
        kept("viewer-episode", taken(wide, episode, token=4))
        narrow = browser.new_page(base_url=address, viewport={"width": 400, "height": 800}, color_scheme="dark")
        pair = Image.new("RGB", (812, 800), "white")
        pair.paste(taken(narrow, "#/"), (0, 0))
        pair.paste(taken(narrow, episode, token=4), (412, 0))
        kept("viewer-narrow", pair)
        browser.close()


if __name__ == "__main__":
    main()
