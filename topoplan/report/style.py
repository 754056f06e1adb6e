"""How the page looks, on light and dark ground and on paper, and how trees are stepped through.

Nothing is loaded from elsewhere. Without the script everything is there to be read: it only shows the buttons and
moves the marks.
"""

STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1a1a1a; --faint: #5c5c5c; --rule: #d9d9d9;
  --card: #f6f7f8; --nvlink: #0072b2; --pcie: #d55e00; --sys: #b0568a; --network: #333333; --c2c: #b07900;
  --up: #d55e00; --down: #00805d; --good: #00694c; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ground: #16181b; --ink: #e8e8e8; --faint: #a8adb3; --rule: #3b4046;
  --card: #1f2226; --nvlink: #56b4e9; --pcie: #ff9b54; --sys: #e29cc5; --network: #d0d0d0; --c2c: #f0c040;
  --up: #ff9b54; --down: #3ecf9f; --good: #3ecf9f; --bad: #ff8a80; } }
body { margin: 0 auto; max-width: 76rem; padding: 1rem 1.5rem 4rem; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; margin: 0.5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 0.5rem; border-bottom: 1px solid var(--rule); }
h3 { font-size: 1.05rem; margin: 1.5rem 0 0.4rem; }
p, li, figcaption { overflow-wrap: anywhere; }
nav ul, ul.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: 0.2rem 1.4rem;
  margin: 0.5rem 0; }
ul.legend { font-size: 0.85rem; }
ul.legend svg { vertical-align: middle; }
a { color: var(--nvlink); }
.small, caption { font-size: 0.85rem; color: var(--faint); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.82rem; font-variant-numeric: tabular-nums; margin: 0.6rem 0; }
caption { text-align: left; padding-bottom: 0.3rem; }
th, td { padding: 0.2rem 0.7rem 0.2rem 0; text-align: left; border-bottom: 1px solid var(--rule); white-space: nowrap; }
td.long { white-space: normal; min-width: 18rem; overflow-wrap: anywhere; }
th.number, td.number { text-align: right; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.2rem 1rem; }
dt { color: var(--faint); } dd { margin: 0; overflow-wrap: anywhere; }
.good { color: var(--good); } .bad { color: var(--bad); } .good, .bad { font-weight: 600; }
figure { margin: 1rem 0; }
figcaption { font-weight: 600; font-size: 0.95rem; }
details { margin: 0.5rem 0; } summary { cursor: pointer; color: var(--faint); font-size: 0.9rem; }
svg { max-width: 100%; height: auto; } .scroll > svg { max-width: none; }
@media screen { .panel { overflow-x: auto; } .panel svg { max-width: max(100%, 56rem); } }
svg text { font: 10.5px "DejaVu Sans", system-ui, sans-serif; fill: var(--ink); }
.wire { fill: none; stroke-linejoin: round; }
.nvlink { stroke: var(--nvlink); } .pcie { stroke: var(--pcie); } .sys { stroke: var(--sys); stroke-dasharray: 6 4; }
.network { stroke: var(--network); stroke-dasharray: 2 4; } .c2c { stroke: var(--c2c); stroke-dasharray: 8 3 2 3; }
.device rect { stroke: #000000; stroke-width: 0.8; } .device text { fill: #000000; }
.gpu rect { fill: #56b4e9; } .nvswitch rect { fill: #0072b2; } .pcie rect { fill: #d9d9d9; stroke: #000000; }
.cpu rect { fill: #595959; } .nic rect { fill: #f0e442; } .switch rect { fill: #000000; stroke: #888888; }
.helper rect { fill: #009e73; }
.nvswitch text, .cpu text, .switch text, .helper text { fill: #ffffff; }
g.device { stroke: none; stroke-dasharray: none; }
svg text.count, svg text.beside { stroke: var(--ground); stroke-width: 4px; paint-order: stroke; }
svg text.beside { font-size: 8.5px; fill: var(--faint); }
.grid { stroke: var(--rule); } .axis { stroke: var(--faint); } svg text.tick { font-size: 12px; fill: var(--faint); }
.curve line { stroke-width: 2; fill: none; } .curve circle, .curve polygon { stroke: var(--ground); stroke-width: 1; }
.curve0 { stroke: var(--nvlink); fill: var(--nvlink); } .curve1 { stroke: var(--pcie); fill: var(--pcie); }
.curve2 { stroke: var(--down); fill: var(--down); } .curve3 { stroke: var(--sys); fill: var(--sys); }
.curve1 line { stroke-dasharray: 7 3; } .curve2 line { stroke-dasharray: 2 3; }
.curve3 line { stroke-dasharray: 9 3 2 3; }
.trees { display: flex; flex-wrap: wrap; gap: 0.8rem; }
figure.steps { flex: 1 1 auto; min-width: 0; margin: 0; background: var(--card);
  border: 1px solid var(--rule); border-radius: 8px; padding: 0.7rem 1rem; }
figure.steps:focus-visible { outline: 2px solid var(--nvlink); }
.controls { display: flex; flex-wrap: wrap; gap: 0.4rem; align-items: center; margin: 0.5rem 0; }
.controls[hidden] { display: none; }
.controls output { font-size: 0.9rem; color: var(--faint); flex-basis: 100%; }
button { font: inherit; font-size: 0.9rem; padding: 0.15rem 0.8rem; border: 1px solid var(--faint); border-radius: 6px;
  background: var(--ground); color: var(--ink); cursor: pointer; }
.rank circle { fill: #ffffff; stroke: #000000; stroke-width: 1; } .rank text { fill: #000000; }
.rank.root circle { stroke-width: 3; }
.rank circle { fill: #cfe8f8; } .rank.root circle { fill: #ffffff; }
.rank.has circle { fill: #8fe0c0; }
.chunk { visibility: hidden; } .chunk.on { visibility: visible; }
.chunk circle, .sign { stroke: var(--ground); }
.chunk.up circle { fill: #d55e00; } .chunk.down circle { fill: #00805d; }
.chunk text { fill: #ffffff; font-weight: 700; stroke: none; }
.sign { display: inline-block; width: 1.4em; line-height: 1.4em; border-radius: 50%; text-align: center; color: #ffffff;
  font-weight: 700; }
.sign.up { background: #d55e00; } .sign.down { background: #00805d; }
.sign.has { background: #8fe0c0; color: #000000; border: 1px solid #000000; font-weight: 400; }
@media print { :root { --ground: #ffffff; --ink: #000000; --faint: #444444; --rule: #bbbbbb; --card: #ffffff;
    --nvlink: #0072b2; --pcie: #d55e00; --sys: #b0568a; --network: #333333; --c2c: #b07900; --down: #00805d; }
  body { max-width: none; padding: 0; font-size: 11pt; } nav, .controls { display: none; }
  .trees { display: block; } figure.steps { margin: 0.5rem 0; }
  figure, tr { break-inside: avoid; } h2, h3 { break-after: avoid; } .scroll { overflow: visible; }
  .scroll > svg, svg { max-width: 100%; } td, th { white-space: normal; } }
"""

SCRIPT = """
"use strict";
for (const figure of document.querySelectorAll("figure.steps")) {
  const depth = Number(figure.dataset.depth), chunks = Number(figure.dataset.chunks), last = depth + chunks - 1;
  const controls = figure.querySelector(".controls"), told = controls.querySelector("output");
  const play = controls.querySelector("[data-do=play]");
  const marks = [...figure.querySelectorAll(".chunk")], ranks = [...figure.querySelectorAll("[data-has]")];
  let step = 0, timer = null;
  const show = () => {
    const under = { up: [], down: [] };
    for (const mark of marks) {
      const chunk = step - Number(mark.dataset.step), on = step > 0 && chunk >= 1 && chunk <= chunks;
      mark.classList.toggle("on", on);
      if (on) {
        mark.querySelector("text").textContent = chunk;
        under[mark.classList.contains("up") ? "up" : "down"].push(chunk);
      }
    }
    for (const rank of ranks) rank.classList.toggle("has", step >= Number(rank.dataset.has) + chunks);
    const words = [];
    for (const way of ["up", "down"]) {
      const list = [...new Set(under[way])].sort((a, b) => a - b);
      if (list.length) words.push((list.length > 1 ? "chunks " : "chunk ") + list.join(", ") + " " + way);
    }
    told.textContent = step === 0 ? chunks + " chunks, " + last + " steps"
      : step > last ? "done after " + last + " steps" : "step " + step + " of " + last + ": " + words.join("; ");
  };
  const go = (to) => { step = Math.max(0, Math.min(last + 1, to)); show(); };
  const stop = () => { clearInterval(timer); timer = null; play.textContent = "play"; };
  const act = {
    first: () => { stop(); go(0); },
    back: () => { stop(); go(step - 1); },
    next: () => { stop(); go(step + 1); },
    play: () => {
      if (timer !== null) { stop(); return; }
      if (step > last) go(0);
      play.textContent = "pause";
      timer = setInterval(() => { go(step + 1); if (step > last) stop(); }, 900);
    },
  };
  controls.addEventListener("click", (event) => { const what = event.target.dataset.do; if (what) act[what](); });
  figure.addEventListener("keydown", (event) => {
    const what = { ArrowLeft: "back", ArrowRight: "next", Home: "first", " ": "play" }[event.key];
    if (!what || (event.key === " " && event.target !== figure)) return;
    event.preventDefault();
    act[what]();
  });
  controls.hidden = false;
  show();
}
addEventListener("beforeprint", () => { for (const part of document.querySelectorAll("details")) part.open = true; });
"""
