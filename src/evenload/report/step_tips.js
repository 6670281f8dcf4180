// Tooltips of the step view: what a bar, a line or a slice is, in lines of plain text (never markup).
"use strict";
Evenload.stepTips = (() => {
  const { seconds, bytes, count } = Evenload.chart;
  const { held, kindsHeld } = Evenload.stepMemory;
  const unit = document.documentElement.dataset.unit;
  const MOST_KINDS = 8;
  const MOST_DOCUMENTS = 6;

  const sliceText = (plan, slice) => {
    const doc = plan.sliceDoc[slice];
    const tokens = plan.docTokens[doc];
    const start = plan.sliceStart[slice];
    const length = plan.sliceLength[slice];
    const shared = plan.sliceCp[slice] > 1 ? `, shared by ${plan.sliceCp[slice]} ranks` : "";
    return length === tokens
      ? `doc ${plan.docId[doc]}: all ${count(tokens)} ${unit}${shared}`
      : `doc ${plan.docId[doc]}: ${unit} ${count(start)} to ${count(start + length)} of ${count(tokens)}${shared}`;
  };

  const packLines = (plan, pack) => {
    const slices = [];
    for (let s = pack.first; s < pack.last; s++) slices.push(s);
    const cut = slices.filter((s) => plan.sliceLength[s] !== plan.docTokens[plan.sliceDoc[s]]).length;
    const lines = [`${count(pack.tokens)} ${unit} of ${count(slices.length)} document${slices.length === 1 ? "" : "s"}, ${count(cut)} of them sliced`];
    const padding = pack.padTo ? pack.padTo * slices.length - pack.tokens : 0;
    if (padding) lines.push(`padded to ${count(pack.padTo)} ${unit} each: ${count(padding)} ${unit} for nothing`);
    lines.push(...slices.slice(0, MOST_DOCUMENTS).map((s) => sliceText(plan, s)));
    if (slices.length > MOST_DOCUMENTS) lines.push(`and ${count(slices.length - MOST_DOCUMENTS)} more`);
    return lines;
  };

  const forTask = (panel, { task, lane }, { kinds, sides }) => {
    const { timeline, plan } = panel;
    const kind = kinds[timeline.kind[task]];
    const number = timeline.pack[task];
    const direction = timeline.kind[task] ? 1 : 0;
    const start = timeline.start[task];
    const end = timeline.end[task];
    const lines = [
      [`${timeline.stage[task]}${kind.letter}${number}`, `  ${kind.name}, stage ${timeline.stage[task]}, pack ${number}`],
      `${seconds(end - start)}  (${start.toFixed(6)} s to ${end.toFixed(6)} s)  on dp ${lane.dp}, rank ${lane.rank}`,
    ];
    const pack = plan?.byKey.get(`${lane.dp}/${direction}/${number}`);
    if (pack) lines.push(...packLines(plan, pack));
    lines.push(...sideLines(timeline, lane, start, end, sides));
    const during = held(timeline, lane, start);
    if (during !== undefined) {
      lines.push(`memory ${bytes(during)} while it runs, ${bytes(held(timeline, lane, end))} after`);
    }
    if (timeline.critical[task]) lines.push("on the critical path: the replica ends later if this takes longer");
    return lines;
  };

  // Seconds of recompute and copies inside of a task.
  const sideLines = (timeline, lane, start, end, sides) => {
    if (!timeline.sides) return [];
    const lines = [];
    for (let i = lane.firstSide; i < lane.lastSide; i++) {
      const { kind, start: from, end: to } = timeline.sides;
      if (from[i] >= end || to[i] <= start) continue;
      lines.push(`${sides[kind[i]].name}: ${seconds(to[i] - from[i])}`);
    }
    return lines;
  };

  const forMemory = ({ timeline, limitBytes }, found, memory) => {
    const kinds = kindsHeld(timeline, found.lane, found.at);
    return [
      [`rank ${found.lane.rank}`, ` of dp ${found.lane.dp}`],
      `${bytes(found.bytes)} at ${seconds(found.at)}`,
      `peak ${bytes(found.lane.peakBytes)}${limitBytes ? ` of ${bytes(limitBytes)}` : ""}`,
      ...kinds.slice(0, MOST_KINDS).map(([kind, value]) => `${memory[kind].name}: ${bytes(value)}`),
    ];
  };

  const forSlice = (panel, { slice, pack: number }) => {
    const { plan, timeline } = panel;
    const pack = plan.packs[number];
    const doc = plan.sliceDoc[slice];
    const lines = [
      [`doc ${plan.docId[doc]}`, `  ${pack.direction ? "backward" : "forward"}, pack ${pack.index} of dp ${pack.dp}`],
      sliceText(plan, slice),
      `${count(plan.sliceLength[slice])} ${unit} of the pack's ${count(pack.tokens)}`,
    ];
    const policy = plan.policies[plan.docPolicy[doc]];
    if (policy !== "replay") lines.push(`kept for backward: ${policy}`);
    const [start, end] = packSpan(timeline, pack);
    if (end > start) lines.push(`the pack runs from ${seconds(start)} to ${seconds(end)}, all stages`);
    return lines;
  };

  const packSpan = (timeline, { dp, direction, index }) => {
    let start = Infinity;
    let end = -Infinity;
    for (const lane of timeline.lanes) {
      if (lane.dp !== dp) continue;
      for (let i = lane.first; i < lane.last; i++) {
        if (timeline.pack[i] !== index || (timeline.kind[i] ? 1 : 0) !== direction) continue;
        start = Math.min(start, timeline.start[i]);
        end = Math.max(end, timeline.end[i]);
      }
    }
    return [start, end];
  };

  return { forTask, forMemory, forSlice };
})();
