// What the theme's settings for mermaid lack: on a phone a diagram that is made to fit cannot be read, so that it gets narrow
// columns and wrapped text there; and the heads of arrows are dark on dark pages.
{
  const phone = {
    wrap: true, width: 104, actorMargin: 10, diagramMarginX: 6, noteMargin: 4,
    actorFontSize: "12px", messageFontSize: "12px", noteFontSize: "12px",
  }
  const narrow = innerWidth < 760
  const small = "text, tspan { font-size: 12px !important; }" // the theme's own sizes win over the settings
  const initialize = mermaid.initialize
  mermaid.initialize = config => initialize({
    ...config,
    themeCSS: `${config.themeCSS ?? ""}
      marker path, marker polygon {
        fill: var(--md-mermaid-sequence-message-line-color) !important;
        stroke: var(--md-mermaid-sequence-message-line-color) !important;
      }
      ${narrow ? small : ""}`,
    sequence: { ...config.sequence, ...(narrow ? phone : {}) },
  })
}
