/** Drawings of a round's tree and of the tokens of each step. */

const SVG = "http://www.w3.org/2000/svg";
// Sizes in pixels, and how much of a large tree is drawn.
const COLUMN = 88, ROW = 28, NODE = 20, CHARACTER = 7, MOST_COLUMNS = 16, MOST_ROWS = 8;
const LONGEST_LABEL = 9;
const STEP_HEIGHT = 48, FEWEST_STEPS = 40;

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
  const accepted = new Set(tree.accepted);
  const children = new Map([[-1, []]]);
  tree.parents.forEach((parent, node) => {
    children.set(node, []);
    children.get(parent).push(node);
  });
  const places = new Map([[-1, { x: 6, y: ROW / 2 }]]);
  const drawn = [make("circle", { class: "anchor", cx: 6, cy: ROW / 2, r: 4 })];
  let rows = 1, columns = 0;

  const place = (parent, depth, row) => {
    const nodes = children.get(parent).sort((a, b) => accepted.has(b) - accepted.has(a) || a - b);
    nodes.forEach((node, i) => {
      const own = i === 0 ? row : rows;
      if (depth >= MOST_COLUMNS || own >= MOST_ROWS) return;
      rows = Math.max(rows, own + 1);
      columns = Math.max(columns, depth + 1);
      const at = { x: 28 + depth * COLUMN, y: own * ROW + ROW / 2 };
      places.set(node, { x: at.x + COLUMN - 22, y: at.y });
      drawn.push(...drawNode(tree.tokens[node], places.get(parent), at, depth, accepted.has(node)));
      place(node, depth + 1, own);
    });
  };
  place(-1, 0, 0);

  const hidden = tree.parents.length - places.size + 1;
  const width = 28 + columns * COLUMN, height = rows * ROW + (hidden ? ROW / 2 : 0);
  if (hidden) drawn.push(make("text", { class: "more", x: 28, y: height - 3 }, `${hidden} more`));
  for (const [name, value] of [["width", width], ["height", height]]) svg.setAttribute(name, value);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("aria-label", `${tree.tokens.length} tokens drafted, accepted: ${
    tree.accepted.map((node) => tree.tokens[node]).join("") || "none"}`);
  svg.replaceChildren(...drawn);
}

/** An edge and a node. Nodes appear level by level. */
function drawNode(token, from, at, depth, accepted) {
  const name = label(token), width = Math.max(NODE, name.length * CHARACTER + 10);
  const end = COLUMN - 22, middle = (from.x + at.x) / 2;
  const group = make("g", { class: accepted ? "node accepted" : "node" });
  group.style.setProperty("--depth", depth);
  const rest = width < end ? ` M${at.x + width} ${at.y} H${at.x + end}` : "";
  group.append(
    make("path", {
      d: `M${from.x} ${from.y} C${middle} ${from.y} ${middle} ${at.y} ${at.x} ${at.y}${rest}`,
    }),
    make("rect", { x: at.x, y: at.y - NODE / 2, width, height: NODE, rx: 5 }),
    make("text", { x: at.x + width / 2, y: at.y + 4 }, name),
  );
  return [group];
}

/** A token as a short label: white space is made visible. */
function label(token) {
  const shown = token.trim() || token.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣");
  const letters = [...shown];
  return letters.length > LONGEST_LABEL ? letters.slice(0, LONGEST_LABEL - 1).join("") + "…" : shown;
}

/** Draws a bar a step, as high as its tokens; the accepted ones in colour. */
export function drawSteps(svg, steps) {
  const most = Math.max(4, ...steps.map((step) => step.tokens));
  const width = Math.max(FEWEST_STEPS, steps.length), unit = STEP_HEIGHT / most;
  const bar = (i, from, count, kind) =>
    make("rect", {
      class: kind, x: i + 0.1, width: 0.8, y: STEP_HEIGHT - (from + count) * unit, height: count * unit,
    });
  svg.setAttribute("viewBox", `0 0 ${width} ${STEP_HEIGHT}`);
  svg.setAttribute("aria-label", `${steps.length} steps, at most ${most} tokens in one`);
  svg.replaceChildren(...steps.flatMap((step, i) => {
    const drafted = Math.min(step.tree?.accepted.length ?? 0, step.tokens);
    return [bar(i, 0, drafted, "drafted"), bar(i, drafted, step.tokens - drafted, "plain")];
  }));
}

function make(kind, attributes, text) {
  const element = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}
