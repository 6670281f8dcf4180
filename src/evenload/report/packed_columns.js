// Inverse of packed_columns.py and step_blocks.py: data blocks of the page to typed columns, unpacked when needed.
"use strict";
(() => {
  const TYPES = {
    u1: Uint8Array, i1: Int8Array, u2: Uint16Array, i2: Int16Array, u4: Uint32Array, i4: Int32Array, f8: Float64Array,
  };

  const unpack = async (block, directory) => {
    const text = atob(document.getElementById(block).textContent);
    const packed = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const bytes = await new Response(stream).arrayBuffer();
    const columns = {};
    let at = 0;
    for (const [name, type, length] of directory) {
      columns[name] = new TYPES[type](bytes, at, length);
      at += columns[name].byteLength;
    }
    return columns;
  };

  const readTimeline = async (view) => {
    const c = await unpack(view.block, view.columns);
    const n = c.gap.length;
    const start = new Float64Array(n);
    const end = new Float64Array(n);
    const numSamples = c.laneSamples.reduce((sum, part) => sum + part, 0);
    const time = new Float64Array(numSamples);
    const bytes = new Float64Array(numSamples);
    const numSides = c.sideKind?.length ?? 0;
    const sides = c.laneSides
      ? { kind: c.sideKind, start: new Float64Array(numSides), end: new Float64Array(numSides) }
      : null;
    const kinds = view.memoryKinds.map((name) => ({ name, bytes: new Float64Array(time.length), kib: c[`kib ${name}`] }));
    const lanes = [];
    let task = 0;
    let sample = 0;
    let side = 0;
    for (let i = 0; i < c.laneDp.length; i++) {
      const lane = { dp: c.laneDp[i], rank: c.laneRank[i], first: task, firstSample: sample, firstSide: side, endS: 0, peakBytes: 0 };
      let units = 0;
      for (const last = task + c.laneTasks[i]; task < last; task++) {
        start[task] = (units + c.gap[task]) * view.unitS;
        units += c.gap[task] + c.length[task];
        end[task] = units * view.unitS;
        lane.endS = Math.max(lane.endS, end[task]);
      }
      units = 0;
      for (const last = side + (sides ? c.laneSides[i] : 0); side < last; side++) {
        units += c.sideStart[side];
        sides.start[side] = units * view.unitS;
        sides.end[side] = (units + c.sideLength[side]) * view.unitS;
      }
      units = 0;
      let kib = 0;
      const held = kinds.map(() => 0);
      for (const last = sample + c.laneSamples[i]; sample < last; sample++) {
        units += c.sampleGap[sample];
        time[sample] = units * view.unitS;
        kinds.forEach((kind, k) => {
          held[k] += kind.kib[sample];
          kind.bytes[sample] = held[k] * 1024;
        });
        kib = kinds.length ? held.reduce((sum, part) => sum + part, 0) : kib + c.kib[sample];
        bytes[sample] = kib * 1024;
        lane.peakBytes = Math.max(lane.peakBytes, bytes[sample]);
      }
      lanes.push({ ...lane, last: task, lastSample: sample, lastSide: side });
    }
    return {
      lanes, start, end, stage: c.stage, kind: c.kind, pack: c.pack, critical: c.critical, sides, time, bytes, kinds,
      tail: view.tail,
      stepTimeS: view.stepTimeS, bubble: view.bubble, endS: lanes.reduce((most, lane) => Math.max(most, lane.endS), 0),
    };
  };

  const readPlan = async (view) => {
    const c = await unpack(view.block, view.columns);
    const packs = [];
    const byKey = new Map();
    const slicesOfDoc = Array.from(c.docId, () => []);
    let at = 0;
    for (let p = 0; p < c.packDp.length; p++) {
      const pack = { dp: c.packDp[p], direction: c.packDirection[p], index: c.packIndex[p], first: at };
      let tokens = 0;
      for (const last = at + c.packSlices[p]; at < last; at++) {
        tokens += c.sliceLength[at];
        slicesOfDoc[c.sliceDoc[at]].push({ slice: at, pack: p });
      }
      packs.push({ ...pack, last: at, tokens, padTo: c.packPadTo[p] });
      byKey.set(`${pack.dp}/${pack.direction}/${pack.index}`, packs[p]);
    }
    const counts = new Map();
    for (const { dp, direction } of packs) counts.set(`${dp}/${direction}`, (counts.get(`${dp}/${direction}`) ?? 0) + 1);
    return { ...c, packs, byKey, slicesOfDoc, counts, policies: view.policies, leftOut: view.leftOut };
  };

  const unpacked = new Map();
  const once = (read) => (view) => {
    if (!view) return Promise.resolve(null);
    if (!unpacked.has(view.block)) unpacked.set(view.block, read(view));
    return unpacked.get(view.block);
  };
  Evenload.timeline = once(readTimeline);
  Evenload.plan = once(readPlan);
})();
