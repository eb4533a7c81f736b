// What the theme's settings for mermaid lack: on a phone a diagram that is made to fit cannot be read, so that it keeps its
// size there, and scrolls; and the heads of arrows are dark on dark pages.
{
  const initialize = mermaid.initialize
  mermaid.initialize = config => initialize({
    ...config,
    themeCSS: `${config.themeCSS ?? ""}
      marker path, marker polygon {
        fill: var(--md-mermaid-sequence-message-line-color) !important;
        stroke: var(--md-mermaid-sequence-message-line-color) !important;
      }`,
    sequence: { ...config.sequence, useMaxWidth: innerWidth >= 760, actorMargin: 40 },
  })
}
