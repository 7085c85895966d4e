/** Drawings of a round's tree and of the tokens of each step. */

import { accepted } from "./run.js";

const SVG = "http://www.w3.org/2000/svg";
// Sizes in pixels, and how much of a large tree is drawn.
const ROW = 28, NODE = 20, GAP = 24, CHARACTER = 7.3, MAX_COLUMNS = 20, MAX_ROWS = 8;
const MAX_LABEL = 9;
const STEP_HEIGHT = 48, MARK_HEIGHT = 4, MIN_STEPS = 40;
const ROOT = { row: 0, x: 4, width: 4 };

/**
 * Draws a tree from left to right, a column a level. The accepted path is the first row.
 *
 * @param {SVGElement} svg Where to draw.
 * @param {{tokens: string[], parents: number[], accepted: number[]} | null} tree Null: nothing.
 */
export function drawTree(svg, tree) {
  if (!tree) {
    svg.replaceChildren();
    return;
  }
  const { nodes, rows } = place(tree);
  const widths = [];
  for (const { depth, width } of nodes) widths[depth] = Math.max(widths[depth] ?? 0, width);
  let right = ROOT.x + ROOT.width;
  const columns = widths.map((width) => {
    const left = right + GAP;
    right = left + width;
    return left;
  });
  for (const node of nodes) node.x = columns[node.depth];

  const hidden = tree.tokens.length - nodes.length;
  const width = right + 2, height = rows * ROW + (hidden ? ROW / 2 : 0);
  for (const [name, value] of [["width", width], ["height", height]]) svg.setAttribute(name, value);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("aria-label", `${tree.tokens.length} tokens drafted, accepted: ${
    tree.accepted.map((node) => tree.tokens[node]).join("") || "none"}`);
  svg.replaceChildren(
    make("circle", { class: "anchor", cx: ROOT.x, cy: ROW / 2, r: 4 }),
    ...nodes.map(drawNode),
    ...(hidden ? [make("text", { class: "more", x: columns[0] ?? 0, y: height - 3 }, `${hidden} more`)] : []),
  );
}

/** The paths of a tree in words, the accepted one first, for those who do not see the drawing. */
export function pathsOf(tree) {
  const inner = new Set(tree?.parents), accepted = new Set(tree?.accepted);
  const paths = (tree?.tokens ?? []).flatMap((_, leaf) => {
    if (inner.has(leaf)) return [];
    const path = [];
    for (let node = leaf; node >= 0; node = tree.parents[node]) path.unshift(node);
    const right = path.filter((node) => accepted.has(node)).length;
    const text = (nodes) => JSON.stringify(nodes.map((node) => tree.tokens[node]).join(""));
    const [taken, refused] = [path.slice(0, right), path.slice(right)];
    return [{ right, text: [
      taken.length ? `accepted ${text(taken)}` : "", refused.length ? `not accepted ${text(refused)}` : "",
    ].filter(Boolean).join(", ") }];
  });
  return paths.sort((a, b) => b.right - a.right).map(({ text }) => text);
}

/** Rows and columns of the nodes that are drawn, parents before children. */
function place(tree) {
  const accepted = new Set(tree.accepted), children = new Map([[-1, []]]), nodes = [];
  tree.parents.forEach((parent, node) => {
    children.set(node, []);
    children.get(parent).push(node);
  });
  let rows = 1;
  const below = (index, parent, depth) => {
    const order = children.get(index).sort((a, b) => accepted.has(b) - accepted.has(a) || a - b);
    order.forEach((child, i) => {
      const row = i === 0 ? parent.row : rows;
      if (depth >= MAX_COLUMNS || row >= MAX_ROWS) return;
      rows = Math.max(rows, row + 1);
      const name = label(tree.tokens[child]);
      const width = Math.max(NODE, name.length * CHARACTER + 12);
      nodes.push({ name, parent, depth, row, width, accepted: accepted.has(child) });
      below(child, nodes.at(-1), depth + 1);
    });
  };
  below(-1, ROOT, 0);
  return { nodes, rows };
}

/** A node with the edge from its parent. Nodes appear level by level. */
function drawNode({ name, parent, depth, row, x, width, accepted }) {
  const group = make("g", { class: accepted ? "node accepted" : "node" });
  group.style.setProperty("--depth", depth);
  const y = row * ROW + ROW / 2, fromX = parent.x + parent.width, fromY = parent.row * ROW + ROW / 2;
  const middle = x - GAP / 2;
  group.append(
    make("path", {
      d: `M${fromX} ${fromY} H${x - GAP} C${middle} ${fromY} ${middle} ${y} ${x} ${y}`,
    }),
    make("rect", { x, y: y - NODE / 2, width, height: NODE, rx: 5 }),
    make("text", { x: x + width / 2, y: y + 4 }, name),
  );
  return group;
}

/** A token as a short label: white space is made visible. */
function label(token) {
  const shown = token.trim() || token.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣");
  const letters = [...shown];
  return letters.length > MAX_LABEL ? letters.slice(0, MAX_LABEL - 1).join("") + "…" : shown;
}

/**
 * Draws a bar a step, as high as its tokens; the accepted ones in colour.
 *
 * @param {SVGElement} svg Where to draw.
 * @param {{tokens: number, tree: object | null}[]} steps The steps.
 * @param {number} shown Index of the step whose bar is marked; -1: none.
 */
export function drawSteps(svg, steps, shown) {
  const highest = Math.max(4, ...steps.map((step) => step.tokens));
  const width = Math.max(MIN_STEPS, steps.length), unit = (STEP_HEIGHT - 2 * MARK_HEIGHT) / highest;
  const bar = (i, from, count, kind) =>
    make("rect", {
      class: kind, x: i + 0.1, width: 0.8, y: STEP_HEIGHT - (from + count) * unit, height: count * unit,
    });
  svg.setAttribute("viewBox", `0 0 ${width} ${STEP_HEIGHT}`);
  svg.replaceChildren(...steps.flatMap((step, i) => {
    const drafted = Math.min(accepted(step), step.tokens);
    return [
      ...(i === shown ? [make("rect", { class: "shown", x: i, width: 1, y: 0, height: MARK_HEIGHT })] : []),
      bar(i, 0, drafted, "drafted"), bar(i, drafted, step.tokens - drafted, "plain"),
    ];
  }));
}

/** Index of the step at a place of its drawing; it may be behind the last one. */
export function stepAt(svg, clientX) {
  const { left, width } = svg.getBoundingClientRect();
  return Math.floor(((clientX - left) / width) * svg.viewBox.baseVal.width);
}

function make(kind, attributes, text) {
  const element = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}
