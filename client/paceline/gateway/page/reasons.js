/** Why steps of a run were not drafted, in words. */

import { stepsOf } from "./run.js";

export const UNDRAFTED = {
  no_drafter: "the gateway has no drafter service",
  node_budget: "the verifier’s controller finds that drafting does not pay here at present",
  not_ready: "the drafter was not ready",
  late: "the drafter’s tree did not come in time",
  empty: "there was nothing to propose",
  last_token: "only one token was left",
};

/**
 * What to say about steps without a tree; empty if there is nothing to say.
 *
 * @param {object[]} rounds Rounds of a run so far.
 * @param {object | null} usage The run's usage, at its end.
 * @param {string} drafter The drafter that was asked for.
 * @param {string[]} drafters All drafters of the gateway.
 */
export function explain(rounds, usage, drafter, drafters) {
  if (!drafters.length) {
    return "Nothing is drafted: the gateway finds no drafter. `paceline serve` and `paceline drafter` start one.";
  }
  if (drafter === "none") {
    return "Nothing is drafted: the settings say “none”. Every token is the verifier’s own.";
  }
  const counts = new Map();
  for (const { undrafted, steps } of rounds) {
    if (undrafted) counts.set(undrafted, (counts.get(undrafted) ?? 0) + steps);
  }
  if (!counts.size) return "";
  const [reason] = [...counts].sort((a, b) => b[1] - a[1])[0];
  const why = UNDRAFTED[reason] ?? reason;
  const plain = [...counts.values()].reduce((sum, count) => sum + count);
  const drafted = rounds.some((round) => round.tree);
  const failures = Object.keys(usage?.speculation.fallbacks ?? {});
  return [
    drafted ? `${plain} of ${stepsOf(rounds)} steps were not drafted, most because ${why}.`
      : `Nothing is drafted: ${why}.`,
    failures.length ? `Failures: ${failures.join(", ")}; the logs say why.` : "",
  ].join(" ").trim();
}
