// The address of a page keeps what the step view shows, so that a link shows somebody else the same.
// #step-view&strategy=auto&compare=best_fit&step=3&replica=all&memory=kinds&critical=1&time=0.5,1.25&tokens=0,4096
"use strict";
Evenload.stepLink = (() => {
  const MARK = "#step-view&";
  const NOTHING = "-";

  const span = (text) => {
    const parts = (text ?? "").split(",").map(Number);
    return parts.length === 2 && parts.every(Number.isFinite) && parts[0] < parts[1] ? parts : null;
  };

  // What the address says of a state; null where it says nothing of the step view. Unknown names are left out.
  const read = (names) => {
    if (!location.hash.startsWith(MARK)) return null;
    const said = new URLSearchParams(location.hash.slice(MARK.length));
    const found = { view: span(said.get("time")), tokens: span(said.get("tokens")), critical: said.get("critical") === "1" };
    if (names.includes(said.get("strategy"))) found.section = names.indexOf(said.get("strategy"));
    if (said.get("compare") === NOTHING) found.compare = -1;
    else if (names.includes(said.get("compare"))) found.compare = names.indexOf(said.get("compare"));
    if (said.has("step")) found.step = Number(said.get("step"));
    if (said.has("replica")) found.replica = said.get("replica");
    if (["ranks", "kinds"].includes(said.get("memory"))) found.memory = said.get("memory");
    return found;
  };

  const write = (state, names) => {
    const said = new URLSearchParams({
      strategy: names[state.section],
      compare: state.compare < 0 || state.compare === state.section ? NOTHING : names[state.compare],
      step: state.step,
      replica: state.replica,
      memory: state.memory,
    });
    if (state.critical) said.set("critical", "1");
    const short = (values) => values.map((value) => Number(value.toPrecision(7))).join(",");
    if (state.view) said.set("time", short(state.view));
    if (state.tokens) said.set("tokens", short(state.tokens));
    history.replaceState(null, "", MARK + said);
  };

  return { read, write };
})();
