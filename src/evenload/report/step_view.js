// The step view: choose strategy, step and replica; timelines, memory and documents of the choice on shared axes.
"use strict";
(() => {
  const root = document.getElementById("step-view");
  if (!root) return;
  const { count, scale, context, color } = Evenload.chart;
  const { stepTimeline: timelines, stepMemory: memories, stepDocuments: documents, stepTips: tips } = Evenload;
  const { make, legend, memoryLegend, documentLegend, heading, replicaEnds } = Evenload.stepControls;
  const index = JSON.parse(document.getElementById("step-view-data").textContent);
  const { kinds, sections } = index;
  const names = sections.map(({ name }) => name);
  // Canvases have a largest height; beyond this many rows the replicas that end first are left out.
  const MOST_ROWS = 1024;
  // All replicas at once only while their rows are comfortably high.
  const FEW_ROWS = 16;

  const state = {
    section: index.first, compare: index.compare, step: null, replica: null, memory: "ranks", critical: false,
    view: null, tokens: null, drag: null, marked: null,
  };
  Object.assign(state, Evenload.stepLink.read(names));
  let panels = [];
  let plans = [];
  let whole = [0, 1];
  let wholeTokens = [0, 1];
  let shown = 0;

  const choose = (name, value) => {
    const key = name === "strategy" ? "section" : name;
    state[key] = ["strategy", "compare", "step"].includes(name) ? Number(value) : value;
    if (name === "memory" || name === "critical") {
      arrange();
      draw();
      link();
      return;
    }
    Object.assign(state, { view: null, tokens: null, marked: null });
    load().then(link);
  };
  // Zooming and moving come in crowds; the address is written when they rest.
  let linking;
  const link = () => {
    clearTimeout(linking);
    linking = setTimeout(() => Evenload.stepLink.write(state, names), 150);
  };
  const stepBy = (by) => {
    const steps = sections[state.section].steps.map(({ step }) => step);
    const next = steps[steps.indexOf(state.step) + by];
    if (next !== undefined) choose("step", next);
  };
  const controls = Evenload.stepControls.create(choose, {
    before: () => stepBy(-1), after: () => stepBy(1),
    out: () => zoom(2), in: () => zoom(0.5), whole: () => setView(null),
  });
  const legendRow = make("div");
  const keys = "timelines; arrow keys move, + and - zoom, 0 shows the whole step";
  const stage = make("div", "stage", "", { tabindex: 0, role: "group", "aria-label": keys });
  root.querySelector(".view").append(controls.bar, legendRow, stage);

  // Of a trained run the last step is what one looks for first.
  const usual = ({ steps }) => (steps[0].views.measured ? steps.at(-1) : steps[0]);
  const stepOf = (section) => sections[section].steps.find(({ step }) => step === state.step) ?? usual(sections[section]);

  // Loading: unpack what the choice needs, then lay the panels out.
  const load = async () => {
    const turn = ++shown;
    root.removeAttribute("data-drawn");
    const steps = sections[state.section].steps.map(({ step }) => step);
    if (!steps.includes(state.step)) state.step = usual(sections[state.section]).step;
    const chosen = state.compare >= 0 && state.compare !== state.section ? [state.section, state.compare] : [state.section];
    const found = [];
    for (const section of chosen) {
      const step = stepOf(section);
      const plan = await Evenload.plan(step.plan);
      for (const [origin, view] of Object.entries(step.views)) {
        found.push({ section, origin, step: step.step, plan, timeline: await Evenload.timeline(view) });
      }
    }
    if (turn !== shown) return; // chosen again meanwhile
    panels = found;
    arrange();
    // A link may be of a page whose steps took longer.
    state.view = bounded(state.view, whole);
    state.tokens = bounded(state.tokens, wholeTokens);
    draw();
    const drawn = `${state.section}/${state.step}/${state.replica}`;
    // After the frame that draws: until then nothing has a place on the page.
    requestAnimationFrame(() => turn === shown && root.setAttribute("data-drawn", drawn));
  };

  const slowestFirst = (section) => {
    const { timeline } = panels.findLast((panel) => panel.section === section);
    return [...replicaEnds(timeline)].sort((a, b) => b[1] - a[1] || a[0] - b[0]).map(([dp]) => dp);
  };

  const arrange = () => {
    const all = [...new Set(panels.flatMap(({ timeline }) => timeline.lanes.map(({ dp }) => dp)))].sort((a, b) => a - b);
    if (state.replica === null || !["slowest", "all", ...all.map(String)].includes(state.replica)) {
      const most = Math.max(...panels.map(({ timeline }) => timeline.lanes.length));
      state.replica = all.length === 1 ? String(all[0]) : most <= FEW_ROWS ? "all" : "slowest";
    }
    for (const panel of panels) {
      const order = slowestFirst(panel.section);
      const wanted = new Set(state.replica === "slowest" ? order.slice(0, 1) : state.replica === "all" ? [] : [Number(state.replica)]);
      if (state.replica === "all") {
        let rows = 0;
        for (const dp of order) {
          rows += panel.timeline.lanes.filter((lane) => lane.dp === dp).length;
          if (wanted.size && rows > MOST_ROWS) break;
          wanted.add(dp);
        }
      }
      panel.replicas = wanted;
      panel.leftOut = state.replica === "all" ? order.length - wanted.size : 0;
      panel.placed = timelines.place(panel.timeline.lanes.filter(({ dp }) => wanted.has(dp)));
      panel.mostRank = Math.max(...panel.timeline.lanes.map(({ rank }) => rank));
      panel.limitBytes = sections[panel.section].limitBytes;
    }
    plans = [];
    for (const panel of panels) {
      if (!panel.plan || plans.some(({ section }) => section === panel.section)) continue;
      panel.documents = documents.rowsOf(panel.plan, panel.replicas);
      plans.push(panel);
    }
    whole = [0, Math.max(...panels.map(({ timeline }) => Math.max(timeline.stepTimeS, timeline.endS))) * 1.005 || 1];
    wholeTokens = [0, Math.max(1, ...plans.map(({ plan, documents: rows }) => (rows.length ? plan.docTokens[rows[0].doc] : 1))) * 1.02];
    const options = sections.map(({ label }, i) => [String(i), label]);
    controls.fill("strategy", options, state.section);
    const others = options.filter((_, i) => i !== state.section);
    controls.fill("compare", [["-1", "nothing"], ...others], state.compare === state.section ? -1 : state.compare);
    controls.fill("step", sections[state.section].steps.map(({ step }) => [String(step), String(step)]), state.step);
    controls.fill("replica", all.length > 1
      ? [["slowest", `slowest (dp ${slowestFirst(state.section)[0]})`], ["all", `all ${all.length}`], ...all.map((dp) => [String(dp), `dp ${dp}`])]
      : [[String(all[0]), `dp ${all[0]}`]], state.replica);
    const hasKinds = panels.some(({ timeline }) => timeline.kinds.length);
    if (!hasKinds) state.memory = "ranks";
    controls.fill("memory", [["ranks", "every rank"], ...(hasKinds ? [["kinds", "fullest rank by kind"]] : [])], state.memory);
    controls.allowCritical(panels.some(({ timeline }) => timeline.critical.some((on) => on)));
    legendRow.replaceChildren(legend(panels, index));
    build();
  };

  // One block of canvases: the picture, and over it what follows the pointer.
  const canvasPair = (panel, kind) => {
    const wrap = make("div", `pair ${kind}`);
    const what = `${kind} of ${names[panel.section]}, ${panel.origin}; the line above says its numbers`;
    const base = make("canvas", "", "", { role: "img", "aria-label": what });
    const pair = { panel, kind, wrap, base, over: make("canvas", "over") };
    wrap.append(pair.base, pair.over);
    listen(pair);
    pairs.push(pair);
    return pair;
  };
  let pairs = [];
  const build = () => {
    pairs = [];
    const blocks = [];
    for (const panel of panels) {
      blocks.push(heading(panel, panels, names, index.memory));
      blocks.push(canvasPair(panel, "timeline").wrap);
    }
    for (const panel of panels) {
      if (!panel.timeline.bytes.length) continue;
      const lane = state.memory === "kinds" && panel.timeline.kinds.length ? memories.fullest(panel) : null;
      const whose = lane ? `rank ${lane.rank} of dp ${lane.dp} by kind` : "every rank";
      const name = panels.length > 1 ? `: ${names[panel.section]}, ${panel.origin}` : "";
      blocks.push(make("h4", "sub", `Memory of ${whose}${name}`), memoryLegend(panel, index.memory, lane !== null));
      blocks.push(canvasPair(panel, "memory").wrap);
    }
    for (const panel of plans) {
      const total = panel.documents.length;
      const name = plans.length > 1 ? `: ${names[panel.section]}` : "";
      blocks.push(make("h4", "sub", `Documents${name}, longest first (${count(total)}); above forward slices, below backward slices`));
      if (panel === plans[0]) blocks.push(documentLegend());
      const pair = canvasPair(panel, "documents");
      const label = `documents of ${names[panel.section]}`;
      const scroller = make("div", "scroller", "", { tabindex: 0, role: "region", "aria-label": label });
      scroller.style.height = `${documents.heightOf(panel.documents)}px`;
      const space = make("div");
      // The last row must be able to rise above the axis.
      space.style.height = `${Math.max(0, total * documents.ROW_PX + 24 - documents.heightOf(panel.documents))}px`;
      pair.scroller = scroller;
      scroller.append(pair.wrap, space);
      scroller.addEventListener("scroll", () => drawPair(pair));
      blocks.push(scroller);
      const left = panel.plan.leftOut;
      if (left.length) {
        const more = left.length > 5 ? `; and ${count(left.length - 5)} more` : "";
        blocks.push(make("p", "left-out", `Not trained in this step: ${left.slice(0, 5).join("; ")}${more}.`));
      }
    }
    stage.replaceChildren(...blocks);
  };

  // Drawing.
  const PAPER_PX = 650;
  let paper = null;
  const width = () => paper ?? Math.max(240, stage.clientWidth);
  const viewOf = (kind) => (kind === "documents" ? (state.tokens ?? wholeTokens) : (state.view ?? whole));
  const drawPair = (pair) => {
    const { panel, kind } = pair;
    const w = pair.scroller && !paper ? Math.max(240, pair.scroller.clientWidth) : width();
    pair.width = w;
    if (kind === "timeline") timelines.draw(pair.base, panel, viewOf(kind), w, index, state.critical);
    else if (kind === "memory") memories.draw(pair.base, panel, viewOf(kind), w, panel.limitBytes, state.memory === "kinds" ? index.memory : null);
    else documents.draw(pair.base, panel, viewOf(kind), w, pair.scroller.scrollTop, markedPack(panel));
    drawOver(pair);
  };
  let pending = false;
  const draw = () => {
    if (pending) return;
    pending = true;
    requestAnimationFrame(() => {
      pending = false;
      pairs.forEach(drawPair);
      const [from, to] = viewOf("timeline");
      stage.dataset.from = from;
      stage.dataset.to = to;
    });
  };
  const drawOver = ({ panel, kind, base, over, width: w }) => {
    const height = parseFloat(base.style.height);
    const ctx = context(over, w, height);
    if (state.drag && state.drag.kind === kind) {
      const x = scale(viewOf(kind), w);
      ctx.fillStyle = color("--select");
      ctx.fillRect(x.at(Math.min(...state.drag.span)), 0, Math.abs(state.drag.span[1] - state.drag.span[0]) * x.factor, height);
    }
    if (state.marked && state.marked.section === panel.section && kind === "timeline") {
      timelines.mark(ctx, panel, viewOf(kind), w, state.marked);
    }
  };
  const markedPack = (panel) => {
    if (!state.marked || state.marked.section !== panel.section) return null;
    const { dp, direction, pack } = state.marked;
    return panel.plan.packs.indexOf(panel.plan.byKey.get(`${dp}/${direction}/${pack}`));
  };
  const setMarked = (marked) => {
    if (JSON.stringify(marked) === JSON.stringify(state.marked)) return;
    state.marked = marked;
    for (const pair of pairs) {
      if (pair.kind === "documents") drawPair(pair);
      else drawOver(pair);
    }
  };

  // Moving in time (and, over documents, in tokens).
  const bounded = (view, [low, high]) => {
    if (!view) return null;
    const span = Math.min(Math.max(view[1] - view[0], (high - low) * 1e-6), high - low);
    const from = Math.min(Math.max(view[0], low), high - span);
    return span >= (high - low) * 0.9999 ? null : [from, from + span];
  };
  const setView = (view, kind = "timeline") => {
    if (kind === "documents") state.tokens = bounded(view, wholeTokens);
    else state.view = bounded(view, whole);
    draw();
    link();
  };
  const zoom = (factor, at, kind = "timeline") => {
    const [from, to] = viewOf(kind);
    const fixed = at ?? (from + to) / 2;
    setView([fixed - (fixed - from) * factor, fixed + (to - fixed) * factor], kind);
  };
  const pan = (share, kind = "timeline") => {
    const [from, to] = viewOf(kind);
    const by = (to - from) * share;
    setView([from + by, to + by], kind);
  };

  const listen = (pair) =>
    Evenload.stepPointer.listen(pair, {
      of: viewOf, set: setView, zoom, pan, hover, rest,
      select: (kind, span) => {
        state.drag = span && { kind, span };
        pairs.filter((other) => other.kind === kind).forEach(drawOver);
      },
    });

  const hover = ({ panel, kind, width: w, scroller }, event, [px, py]) => {
    if (kind === "timeline") {
      const found = timelines.taskAt(panel, viewOf(kind), w, px, py);
      if (!found) return rest();
      const direction = panel.timeline.kind[found.task] ? 1 : 0;
      setMarked({ section: panel.section, dp: found.lane.dp, direction, pack: panel.timeline.pack[found.task] });
      Evenload.tip.show(tips.forTask(panel, found, index), event);
    } else if (kind === "memory") {
      const found = memories.memoryAt(panel, viewOf(kind), w, panel.limitBytes, px, py, state.memory === "kinds");
      if (!found) return rest();
      Evenload.tip.show(tips.forMemory(panel, found, index.memory), event);
    } else {
      const found = documents.sliceAt(panel, viewOf(kind), w, scroller.scrollTop, px, py);
      if (!found) return rest();
      const { dp, direction, index: pack } = panel.plan.packs[found.pack];
      setMarked({ section: panel.section, dp, direction, pack });
      Evenload.tip.show(tips.forSlice(panel, found), event);
    }
    return undefined;
  };
  const rest = () => {
    Evenload.tip.hide();
    setMarked(null);
  };

  stage.addEventListener("keydown", (event) => {
    const act = {
      ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(0.5), "=": () => zoom(0.5),
      "-": () => zoom(2), 0: () => setView(null), Home: () => setView(null),
    }[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    // Documents are scrolled by these.
    if (event.target.closest(".scroller") && /^(Home|Arrow)/.test(event.key)) return;
    event.preventDefault();
    act();
  });

  // Clicked in a curve: the nearest step that is here.
  document.addEventListener("evenload-step", ({ detail: wanted }) => {
    const steps = sections[state.section].steps.map(({ step }) => step);
    choose("step", steps.reduce((best, step) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best)));
    root.scrollIntoView();
  });
  new ResizeObserver(draw).observe(stage);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  // Unpacked when the page stands, so that it opens at once and is whole when it is printed.
  window.addEventListener("load", () => setTimeout(load));
  window.addEventListener("hashchange", () => {
    const said = Evenload.stepLink.read(names);
    if (!said) return;
    Object.assign(state, { marked: null }, said);
    load();
    root.scrollIntoView();
  });
  if (Evenload.stepLink.read(names)) root.scrollIntoView();
  // Paper is narrower than most windows and cannot wait for a frame.
  for (const [event, width] of [["beforeprint", PAPER_PX], ["afterprint", null]]) {
    window.addEventListener(event, () => {
      paper = width;
      pairs.forEach(drawPair);
    });
  }

  // For tests and the console: where a task or slice is drawn, in pixels of the window.
  root.stepView = {
    state,
    panels: () => panels,
    taskBox: (panelIndex, task) => {
      const pair = pairs.filter(({ kind }) => kind === "timeline")[panelIndex];
      const { timeline, placed } = pair.panel;
      const row = placed.rows.find(({ lane }) => task >= lane.first && task < lane.last);
      const box = pair.over.getBoundingClientRect();
      const x = scale(viewOf("timeline"), pair.width);
      const left = x.at(timeline.start[task]);
      return { x: box.left + left, y: box.top + row.top, width: x.at(timeline.end[task]) - left, height: placed.height };
    },
  };
})();
