// Where the page's numbers come from: one interface, three carriers.
//
//   embedded  the HTML file holds q, k and L; the page computes (data.js, engine.js)
//   served    `kizuki look --serve`: Python computes, asked over HTTP (remote.js, transport.js)
//   notebook  the same questions as messages to the kernel (remote.js, transport.js)
//
// A source has
//   meta                                what the page is made of: model, tokens, layers, heads, means, start
//   layer(layer), slot(head), isFull(layer)
//   received(layer, head)               -> Float32Array [keys], or null where it is not known yet
//   rowStatistic(layer, head, name)     -> Float32Array [queries], or null where it is left out
//   words()                             -> { starts, labels } of the text's words, or null: none, or meta has them
//   next(token)                         -> { names, probabilities, here } of the predicted next tokens, or null
//   ranges(layer)                       -> { first, stop } Int32Array [queries], or null: no such rule
//   picture(layer, head)                -> Python's pooled picture, or null where the source draws at once
//   top(layer, head)                    -> the largest weights of each row, for heads that do not open; or null
//   head(layer, head)                   -> an open head, or null: its q and k are not there
//   engine(receive)                     -> { send(message) }, which makes pictures of open heads (pictures.js)
//   other                               a source of another input to compare with, and its `units`; or undefined
//   listen(changed)                     changed() whenever meta.means or meta.read has grown
// and an open head has `layer`, `head`, `queries`, `keys` and, each taking an AbortSignal last,
//   row(i)            -> { check, weights, score(j) }; weights is null where check.ok is false
//   column(j, refused) -> { weights, score(i) }; rows of the set `refused` (or found wanting) weigh 0
//   cell(i, j)        -> { product, scale, scaled, score, bias, lse, visible, weight, q, k }
//   block(i0, i1, j0, j1) -> { weights, refused }: rows i0..i1-1 by keys j0..j1-1, NaN where not visible
//   bare(i)           -> { products, weights, plane }: row i before its mask: q_i · k_j of all keys j; its weights
//                        without a mask, or null where the page computes them; where q_i and the keys lie (plane.js)
//   values(i, j)      -> { v, output }: v_j and row i of A V; null where the carrier has no v
// All are promises; what is stale is aborted and rejects with an AbortError.
import { byId } from "./dom.js";
import { parseHash } from "./store.js";
import { Data } from "./data.js";
import { Remote } from "./remote.js";
import { http, messages, ofOther } from "./transport.js";
import { unitsOf, written } from "./units.js";

/** The source of this page: a file's own data, a notebook's kernel, or the server it came from. */
export async function openSource() {
  const meta = byId("kz-meta");
  if (meta) {
    const embedded = JSON.parse(meta.textContent), worker = byId("kz-page").textContent;
    const made = (part, mark) => new Data({ ...part, tokens: written(part.tokens) }, worker, mark);
    return embedded.other ? besides(made(embedded, "kz-"), made(embedded.other, "kz-other-")) : made(embedded);
  }
  const transport = byId("kz-notebook") ? await messages() : http();
  const told = async (asker) => {
    const { meta: found } = await asker.ask("meta", {});
    return { ...found, tokens: written(found.tokens) };
  };
  const source = new Remote(await told(transport), transport);
  if (parseHash(location.hash).unit === "word") source.meta.tokens.words = await source.words(); // it opens with them
  if (source.meta.other) {
    const there = ofOther(transport);
    besides(source, new Remote(await told(there), there, false));
  }
  return source;
}

/** A source with another input beside it. */
function besides(source, other) {
  source.other = Object.assign(other, { units: unitsOf(other.meta.tokens).token });
  return source;
}
