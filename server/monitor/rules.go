package monitor

// Rules is a file of rules as Prometheus reads it, in YAML or JSON.
type Rules struct {
	Groups []Group `json:"groups" yaml:"groups"`
}

// Group is a list of rules that Prometheus evaluates in order.
type Group struct {
	Name  string `json:"name" yaml:"name"`
	Rules []Rule `json:"rules" yaml:"rules"`
}

// Rule is a recording rule, which has Record, or an alert, which has Alert, For, Labels and
// Annotations.
type Rule struct {
	Record      string            `json:"record,omitempty" yaml:"record,omitempty"`
	Alert       string            `json:"alert,omitempty" yaml:"alert,omitempty"`
	Expr        string            `json:"expr" yaml:"expr"`
	For         string            `json:"for,omitempty" yaml:"for,omitempty"`
	Labels      map[string]string `json:"labels,omitempty" yaml:"labels,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty" yaml:"annotations,omitempty"`
}

const (
	groupPrefix  = "penstock-"
	recordsGroup = groupPrefix + "records"
)

// NewRules returns the recording rules and the alerts.
func NewRules() Rules {
	recording := Group{Name: recordsGroup}
	for _, r := range Records() {
		recording.Rules = append(recording.Rules, Rule{Record: r.Name, Expr: r.Expr})
	}
	out := Rules{Groups: []Group{recording}}
	for _, a := range Alerts() {
		name := groupPrefix + a.Group
		if last := out.Groups[len(out.Groups)-1]; last.Name != name {
			out.Groups = append(out.Groups, Group{Name: name})
		}
		g := &out.Groups[len(out.Groups)-1]
		g.Rules = append(g.Rules, Rule{
			Alert: a.Name, Expr: a.Expr, For: a.For,
			Labels:      map[string]string{"severity": string(a.Severity)},
			Annotations: map[string]string{"summary": a.Summary, "description": a.Description},
		})
	}
	return out
}
