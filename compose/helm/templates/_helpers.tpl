{{- define "paceline.name" -}}
{{- if contains "paceline" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-paceline{{ end -}}
{{- end }}

{{- define "paceline.secret" -}}
{{- .Values.existingSecret | default (include "paceline.name" .) -}}
{{- end }}

{{- /* Labels that select pods: (list root component). */ -}}
{{- define "paceline.selector" -}}
app.kubernetes.io/name: paceline
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "paceline.labels" -}}
{{ include "paceline.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ (index . 0).Chart.Name }}-{{ (index . 0).Chart.Version }}
{{- end }}

{{- define "paceline.annotations" -}}
prometheus.io/scrape: "true"
prometheus.io/scheme: {{ ternary "http" "https" .Values.metrics.insecure }}
{{- end }}

{{- /* What all pods have in common. */ -}}
{{- define "paceline.pod" -}}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{ toJson . }}
{{- end }}
{{- end }}

{{- define "paceline.volumes" -}}
- name: models
  {{- toYaml .Values.models.volume | nindent 2 }}
- name: secrets
  secret: {secretName: {{ include "paceline.secret" . }}, defaultMode: 0440}
- name: tmp
  emptyDir: {}
# Kernels that were compiled, tables that were measured.
- name: home
  emptyDir: {}
{{- end }}

{{- /* A service's container but for image and arguments: (dict root port metrics gpu resources). */ -}}
{{- define "paceline.container" -}}
imagePullPolicy: {{ .root.Values.images.pullPolicy }}
# The last lines of the log say why a service does not start.
terminationMessagePolicy: FallbackToLogsOnError
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
env:
  - {name: PACELINE_TLS_CA, value: /run/paceline/tls.crt}
  - {name: PACELINE_TOKEN_FILE, value: /run/paceline/token}
  {{- range $name, $value := .root.Values.environment }}
  - {name: {{ $name }}, value: {{ $value | quote }}}
  {{- end }}
ports:
  - {name: {{ .name }}, containerPort: {{ .port }}}
  - {name: metrics-{{ .metrics }}, containerPort: {{ .metrics }}}
{{- $health := list "paceline" "health" (printf "localhost:%d" (int .port)) }}
startupProbe:
  exec: {command: {{ toJson $health }}}
  periodSeconds: 5
  timeoutSeconds: 10
  failureThreshold: 120
readinessProbe:
  exec: {command: {{ toJson $health }}}
  periodSeconds: 10
  timeoutSeconds: 10
livenessProbe:
  tcpSocket: {port: {{ .name }}}
  periodSeconds: 10
  failureThreshold: 6
{{- $resources := deepCopy (.resources | default dict) }}
{{- if .gpu }}
{{- $limits := get $resources "limits" | default dict }}
{{- $resources = set $resources "limits" (set $limits .gpu 1) }}
{{- end }}
resources: {{ toJson $resources }}
volumeMounts:
  - {name: models, mountPath: /models, readOnly: true}
  - {name: secrets, mountPath: /run/paceline, readOnly: true}
  - {name: tmp, mountPath: /tmp}
  - {name: home, mountPath: /home/paceline}
{{- end }}

{{- define "paceline.arguments" -}}
- --address=0.0.0.0:{{ .port }}
- --tls-cert=/run/paceline/tls.crt
- --tls-key=/run/paceline/tls.key
- --metrics-address=0.0.0.0:{{ .metrics }}
{{- if .root.Values.metrics.insecure }}
- --insecure-metrics
{{- end }}
{{- range .more }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- /* The drafter's container: (dict root drafter shared). In the pod of a verifier (shared) it joins that one, at
127.0.0.1:7431, which is its default, and opens its Unix socket, which has an abstract name: a pod has one network
namespace. Else it joins every verifier. */ -}}
{{- define "paceline.drafter" -}}
- name: drafter
  image: {{ .root.Values.images.drafter }}
  args:
    {{- range kindIs "string" .drafter.load | ternary (list .drafter.load) .drafter.load }}
    - --load={{ . }}
    {{- end }}
    - --root=/models
    - --verifier-tls-ca=/run/paceline/tls.crt
    {{- if not .shared }}
    {{- range $index := until (int .root.Values.verifier.count) }}
    - --verifier={{ include "paceline.name" $.root }}-verifier-{{ $index }}.{{ $.root.Release.Namespace }}.svc:7431
    {{- end }}
    {{- end }}
    - --device={{ ternary "cuda" "cpu" (not (empty .drafter.gpu)) }}
    {{- include "paceline.arguments" (dict "root" .root "port" 7432 "metrics" 9432 "more" .drafter.arguments) | nindent 4 }}
  {{- include "paceline.container" (dict "root" .root "name" "drafter" "port" 7432 "metrics" 9432 "gpu" .drafter.gpu "resources" .drafter.resources) | nindent 2 }}
{{- end }}

{{- define "paceline.check" -}}
{{- if .Values.coLocated }}
  {{- if ne (len .Values.drafters) 1 }}
    {{- fail "coLocated takes one entry of drafters: load further versions with `paceline drafters load`" }}
  {{- end }}
{{- else if .Values.verifier.autoscaling.enabled }}
  {{- fail "verifier.autoscaling needs coLocated: other drafters join one pod of each Deployment; set coLocated, or raise verifier.count instead" }}
{{- end }}
{{- end }}
