// What stands around the pictures of the step view: choices, buttons, legend and the line above each timeline.
"use strict";
Evenload.stepControls = (() => {
  const { seconds, bytes, percent } = Evenload.chart;

  const make = (tag, className, text = "", attributes = {}) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text) element.textContent = text;
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };

  // A row of choices; `onChange(name, value)` hears of them.
  const create = (onChange, actions) => {
    const bar = make("div", "controls");
    const selects = {};
    for (const [name, label] of [
      ["strategy", "strategy"], ["compare", "compare with"], ["step", "step"], ["replica", "replica"], ["memory", "memory"],
    ]) {
      const wrap = make("label", "", label);
      selects[name] = make("select", "", "", { name });
      selects[name].addEventListener("change", () => onChange(name, selects[name].value));
      wrap.append(selects[name]);
      bar.append(wrap);
    }
    const button = (name, text, title) => {
      const found = make("button", "", text, { type: "button", name, title, "aria-label": title });
      found.addEventListener("click", actions[name]);
      return found;
    };
    const neighbours = make("span", "neighbours");
    neighbours.append(button("before", "‹", "step before"), button("after", "›", "next step"));
    selects.step.parentElement.after(neighbours);
    const critical = make("input", "", "", { type: "checkbox", name: "critical" });
    critical.addEventListener("change", () => onChange("critical", critical.checked));
    const label = make("label", "check");
    label.append(critical, "critical path");
    const buttons = make("span", "buttons");
    for (const [name, text, title] of [
      ["out", "−", "zoom out (key -)"], ["in", "+", "zoom in (key +)"],
      ["whole", "whole step", "show the whole step (double-click, key 0)"],
    ]) {
      buttons.append(button(name, text, title));
    }
    bar.append(label, buttons);
    // Choices that are none are hidden.
    const fill = (name, options, value) => {
      selects[name].replaceChildren(...options.map(([value, text]) => make("option", "", text, { value })));
      selects[name].value = String(value);
      selects[name].parentElement.hidden = options.length < 2;
      if (name === "step") {
        const at = options.findIndex(([key]) => key === String(value));
        neighbours.hidden = options.length < 2;
        neighbours.firstChild.disabled = at === 0;
        neighbours.lastChild.disabled = at === options.length - 1;
      }
    };
    return { bar, fill, allowCritical: (on) => (label.hidden = !on) };
  };

  const legend = (panels, { kinds, sides, tails }) => {
    const entries = [];
    const numbers = (columns) => [...new Set(columns.flatMap((column) => [...new Set(column)]))].sort((a, b) => a - b);
    for (const kind of numbers(panels.map(({ timeline }) => timeline.kind))) {
      const { name, even, odd } = kinds[kind];
      entries.push([name, `linear-gradient(90deg,${even} 50%,${odd} 50%)`]);
    }
    for (const kind of numbers(panels.map(({ timeline }) => timeline.sides?.kind ?? []))) {
      entries.push([sides[kind].name, sides[kind].inside ? "var(--again)" : sides[kind].color]);
    }
    entries.push(["idle", "var(--idle-solid)"]);
    const ends = [...new Set(panels.flatMap(({ timeline }) => timeline.tail.map(([kind]) => kind)))];
    entries.push(...ends.map((kind) => [tails[kind].name, tails[kind].color]));
    if (panels.some(({ timeline }) => !timeline.tail.length)) entries.push(["gradient reduction, optimizer", "var(--tail)"]);
    return swatches(entries);
  };

  // [name, background, class of the swatch] as a row.
  const swatches = (entries) => {
    const row = make("div", "legend");
    for (const [name, background, className] of entries) {
      const entry = make("span", "", name);
      const swatch = make("i", className);
      swatch.style.background = background;
      entry.prepend(swatch);
      row.append(entry);
    }
    return row;
  };

  // What the colours of a memory picture are: kinds of what is held, or ranks.
  const memoryLegend = ({ timeline, mostRank }, memory, byKind) =>
    byKind
      ? swatches(timeline.kinds.map(({ name }) => [memory[name].name, memory[name].color]))
      : swatches([[mostRank ? `rank 0 to rank ${mostRank}` : "rank 0", Evenload.stepMemory.gradient, "wide"]]);
  const documentLegend = () =>
    swatches([["packs, early to late in the step", Evenload.stepDocuments.gradient, "wide"]]);

  const replicaEnds = (timeline) => {
    const ends = new Map();
    for (const { dp, endS } of timeline.lanes) ends.set(dp, Math.max(ends.get(dp) ?? 0, endS));
    return ends;
  };

  // Runs count no buffers of the running pack; beside a run a prediction says its peak without them, too.
  const withoutBuffers = (panel, panels, memory) => {
    if (panel.origin === "measured") return " without buffers";
    const isRun = panels.some(({ section, origin }) => section === panel.section && origin === "measured");
    if (!isRun || !panel.timeline.kinds.length) return "";
    const peaks = panel.placed.rows.map(({ lane }) => Evenload.stepMemory.countedPeak(panel.timeline, lane, memory));
    return `, ${bytes(Math.max(0, ...peaks))} without buffers`;
  };

  // The line above a timeline: what it is, how long, and how it relates to the first one.
  const heading = (panel, panels, names, memory) => {
    const { timeline } = panel;
    const [first] = panels;
    const title = [names.length > 1 ? names[panel.section] : "", panel.origin].filter(Boolean).join(", ");
    const facts = [`step ${panel.step}: ${seconds(timeline.stepTimeS)}`];
    if (panel !== first && first.timeline.stepTimeS > 0) {
      const ratio = timeline.stepTimeS / first.timeline.stepTimeS;
      facts[0] += panel.section === first.section && first.origin === "predicted"
        ? ` (${ratio >= 1 ? "+" : ""}${percent(ratio - 1)} against predicted)`
        : ` (${ratio.toFixed(2)}× ${names[first.section]})`;
    }
    const ends = replicaEnds(timeline);
    if (ends.size > 1) {
      const [shown] = panel.replicas;
      if (panel.replicas.size === 1) facts.push(`dp ${shown} ends at ${seconds(ends.get(shown))}`);
      facts.push(`replicas end at ${seconds(Math.min(...ends.values()))} to ${seconds(timeline.endS)}`);
    }
    facts.push(`bubble ${percent(timeline.bubble)}`);
    const peak = Math.max(0, ...panel.placed.rows.map(({ lane }) => lane.peakBytes));
    const over = panel.limitBytes && peak > panel.limitBytes;
    if (peak) facts.push(`memory peak ${bytes(peak)}${over ? ", over the limit" : ""}${withoutBuffers(panel, panels, memory)}`);
    if (panel.leftOut) facts.push(`the ${panel.leftOut} replicas that end first are not drawn`);
    const element = make("h4");
    element.append(make("b", "", title), ` ${facts.join(" · ")}`);
    return element;
  };

  return { make, create, legend, memoryLegend, documentLegend, heading, replicaEnds };
})();
